"""The backends that a suite runs over, and the emulator's library, which is built on first use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import backends

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native"  # where `make native` has compiled what the emulator's library shares with the ops


@pytest.fixture(scope="session")
def emulated_library() -> str:
    """The path of libsok_cuda_emulated.so. Set SOK_CUDA_EMULATED_LIBRARY to one that is built already."""
    given = os.environ.get("SOK_CUDA_EMULATED_LIBRARY")
    if given:
        return given
    cmake = Path(sys.executable).with_name("cmake")
    if not (BUILD / "CMakeCache.txt").exists():
        pytest.skip("needs build/native, which make native makes, or SOK_CUDA_EMULATED_LIBRARY")
    program = str(cmake) if cmake.exists() else "cmake"
    library = BUILD / "libsok_cuda_emulated.so"
    with open(BUILD / "emulated.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of pytest-xdist come here
        step = [program, "--build", str(BUILD), "-j", str(os.cpu_count()), "--target", "sok_cuda_emulated"]
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return str(library)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    """sok.cuda, in the emulator and on a device."""
    library = request.getfixturevalue("emulated_library") if request.param == "emulated" else None
    backend = backends.Cuda(request.param, library)
    with backend.loaded():
        yield backend


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Whoever keeps a promise."""
    if request.param == "cpu":
        pytest.importorskip("tensorflow")
        yield backends.Cpu()
        return
    library = request.getfixturevalue("emulated_library") if request.param == "emulated" else None
    made = backends.Cuda(request.param, library)
    with contextlib.ExitStack() as stack:
        stack.enter_context(made.loaded())
        yield made
