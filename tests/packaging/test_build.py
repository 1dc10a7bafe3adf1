"""The build: which TensorFlow it takes, and what is in the source distribution."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sok", "sparse_operation_kit")
sys_path_of_the_build = str(ROOT / "cmake")


@pytest.fixture
def build_environment(monkeypatch):
    monkeypatch.syspath_prepend(sys_path_of_the_build)
    import build_environment

    return build_environment


def make_distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_build_requires_the_tensorflow_that_is_there(build_environment):
    version = importlib.metadata.version("tensorflow")
    assert build_environment.environment_tensorflow() == ("tensorflow", version)
    assert build_environment.tensorflow_requirement() == f"tensorflow=={'.'.join(version.split('.')[:2])}.*"


def test_isolated_build_sees_the_tensorflow_of_the_environment(build_environment, monkeypatch, tmp_path):
    make_distribution(tmp_path, "tensorflow-cpu", "2.21.3")
    monkeypatch.setattr(build_environment, "environment_paths", lambda: [str(tmp_path)])
    # What isolation does: nothing but the build's own packages is on the path.
    monkeypatch.setattr(sys, "path", [])
    assert build_environment.environment_tensorflow() == ("tensorflow-cpu", "2.21.3")
    assert build_environment.tensorflow_requirement() == "tensorflow-cpu==2.21.*"


def test_build_without_any_tensorflow_asks_for_the_supported_one(build_environment, monkeypatch, tmp_path):
    monkeypatch.setattr(build_environment, "environment_paths", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "path", [])
    assert build_environment.environment_tensorflow() is None
    assert build_environment.tensorflow_requirement() == "tensorflow==2.21.*"


def test_sdist_has_every_source_that_the_build_names(tmp_path):
    code = "import sys; sys.path.insert(0, 'cmake'); import build_backend; build_backend.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}

    sources = set(re.findall(r"^\s+((?:cpu|ops)/\w+\.cc)$", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE))
    assert len(sources) >= 18, "the list in CMakeLists.txt was not understood"
    kernels = re.findall(r"^\s+(cuda/\w+\.(?:cu|cc))$", (ROOT / "cmake/cuda.cmake").read_text(), re.MULTILINE)
    assert len(kernels) >= 20, "the lists in cmake/cuda.cmake were not understood"
    sources |= {*kernels, *(f"ops/gpu/{path.name}" for path in (ROOT / "ops" / "gpu").iterdir())}
    python = [f"{package}/**/*.py" for package in PACKAGES]
    patterns = ("include/**/*.h", "cpu/*.h", "ops/*.h", "cuda/**/*.h", *python, "cmake/*")
    files = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    needed = sources | files | {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE"}
    assert needed - names == set()
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith("sok/_native")]


def test_wheel_has_both_packages(tmp_path):
    # From a copy, for a build leaves files behind; without the library, which takes minutes.
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "_native", "__pycache__", "benchmarks", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    code = "import sys; sys.path.insert(0, 'cmake'); import build_backend; build_backend.build_wheel(sys.argv[1])"
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=source,
        env={**os.environ, "SOK_SKIP_NATIVE_BUILD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert len(files) > 60 and files - names == set()


def test_every_place_that_states_the_version_states_the_same():
    import sok

    pyproject = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cmake = re.search(r"project\(sok VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert pyproject and cmake
    assert {pyproject.group(1), cmake.group(1)} == {sok.__version__}


def test_kernels_are_built_by_default_only_where_a_gpu_is(tmp_path):
    cmake = Path(sys.executable).with_name("cmake")
    configure = [str(cmake), "-S", str(ROOT), "-B", str(tmp_path), "-DSOK_OPS=OFF"]
    done = subprocess.run(configure, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        assert "CUDA kernels: OFF" in done.stdout
    refused = subprocess.run([*configure, "-DSOK_CUDA=maybe"], capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0
    for word in ("SOK_CUDA", "AUTO", "NVCC", "'maybe'"):
        assert word in refused.stderr
