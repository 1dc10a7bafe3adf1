"""Drives CMake; what can be said without running code is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel  # setuptools 70.1 and later
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))

from build_environment import tensorflow_requirement  # noqa: E402  found through the line above

NATIVE_FILES = ("libsok_ops.so", "libsok_serving.so", "build_info.json")


class CMakeBuild(build_ext):
    """Builds sok/_native with CMake: in the source tree for an editable install, else in the build folder."""

    def run(self) -> None:
        # For scripts/setup_env.py, which builds the library on its own and shows the progress.
        if os.environ.get("SOK_SKIP_NATIVE_BUILD") == "1":
            return
        # A folder with the libraries of an earlier build: the wheel then is of those that were tested.
        if prebuilt := os.environ.get("SOK_PREBUILT"):
            shutil.copytree(prebuilt, self._output_dir(), dirs_exist_ok=True)
            return
        cmake = self._cmake()
        output = self._output_dir()
        build = Path(self.build_temp).resolve() / "native"
        configure = [
            *[cmake, "-S", str(ROOT), "-B", str(build), "-G", "Unix Makefiles"],
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DSOK_OUTPUT_DIR={output}",
            # A newer compiler may warn about what ours did not; that must not stop an installation.
            "-DSOK_WERROR=OFF",
            f"-DSOK_CUDA={os.environ.get('SOK_CUDA', 'AUTO')}",
        ]
        jobs = os.environ.get("SOK_BUILD_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build), "-j", jobs], check=True)

    def get_outputs(self) -> list[str]:
        return [str(self._output_dir() / name) for name in NATIVE_FILES]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []

    def _output_dir(self) -> Path:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        root = ROOT if in_place else Path(self.build_lib).resolve()
        return root / "sok" / "_native"

    @staticmethod
    def _cmake() -> str:
        beside = Path(sys.executable).parent / "cmake"
        found = str(beside) if beside.exists() else shutil.which("cmake")
        if found is None:
            raise SystemExit("sok is built with cmake, which was not found. Install it: pip install 'cmake<4'")
        return found


class PlatformWheel(bdist_wheel):
    """The library belongs to a platform and to a TensorFlow, and to no version of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("sok._native.libsok_ops", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
    install_requires=["numpy>=2.0", tensorflow_requirement()],
)
