"""The build: which TensorFlow it takes, and what is in the source distribution."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import packaging.requirements
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sok", "sparse_operation_kit", "openembedding", "distributed_embeddings")
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


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """What `make wheel` makes, of the libraries that are tested here: compiling them again takes minutes."""
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "PYTHON": sys.executable, "SOK_PREBUILT": str(ROOT / "sok" / "_native")}
    command = [str(ROOT / "scripts" / "build_wheel.sh"), str(folder)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


def test_sdist_has_every_source_that_the_build_names(dist):
    (archive,) = dist.glob("*.tar.gz")
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


def test_wheel_has_both_packages_and_the_libraries(dist):
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert len(files) > 60 and files - names == set()
    assert {f"sok/_native/{name}" for name in ("libsok_ops.so", "libsok_serving.so", "build_info.json")} <= names
    # TensorFlow's library is in the process already; a second one in the wheel would be another TensorFlow.
    assert not [name for name in names if "tensorflow_framework" in name]


def test_tag_of_the_wheel_covers_what_the_libraries_ask_of_libc(dist):
    (wheel,) = dist.glob("*.whl")
    told = re.fullmatch(r"sok-[\d.]+-py3-none-manylinux_2_(\d+)_\w+\.whl", wheel.name)
    assert told, wheel.name
    needed = set()
    for library in (ROOT / "sok" / "_native").glob("*.so"):
        needed |= set(re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()))
    assert needed and max(map(int, needed)) <= int(told[1])


TRAINS = """
import sys, tensorflow as tf, sok
assert "site-packages" in sok.__file__ and sys.prefix in sok.__file__, sok.__file__
sok.Init(global_batch_size=4, seed=1)
layer = sok.DistributedEmbedding("sum", max_vocabulary_size_per_gpu=10, embedding_vec_size=2, slot_num=1, max_nnz=1)
ids = tf.keras.Input([1], dtype="int64")
model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(layer(ids))))
model.compile(sok.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
losses = model.fit(tf.constant([[1], [2], [3], [1]], tf.int64), tf.ones([4, 1]), epochs=2, verbose=0).history["loss"]
assert losses[1] < losses[0] and layer.embedding_variable.num_rows() == 3, losses
"""


def test_wheel_installs_beside_tensorflow_alone_and_trains_without_a_compiler(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=60)
    python = tmp_path / "bin" / "python"
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    link_distributions("tensorflow", packages)
    # Without an index: what the wheel requires beside TensorFlow and its own requirements would not be found.
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-compile", str(wheel)]
    # Nothing but the environment on PATH: no compiler, no cmake, no horovodrun.
    environment = {"PATH": str(tmp_path / "bin"), "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": str(tmp_path)}
    for command in (pip, [str(python), "-c", TRAINS], [str(tmp_path / "bin" / "sok"), "doctor"]):
        answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "sok is usable." in answer.stdout
    assert re.search(r"horovod.*not installed", answer.stdout, re.I), answer.stdout


def link_distributions(name: str, folder: Path) -> None:
    """Puts a distribution and all that it requires into a site-packages, as links to those of this Python."""
    found = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in found.files or () if ".." not in file.parts} - {"__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(found.locate_file(top))
    for line in found.requires or ():
        requirement = packaging.requirements.Requirement(line)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and not list(folder.glob(f"{requirement.name.replace('-', '_')}-*.dist-info")):
            link_distributions(requirement.name, folder)


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
