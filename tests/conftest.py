"""Fixtures of the whole suite: seed, device marks, eager and graph execution."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import forked as forking
from tests.short_stacks import with_short_stacks

# Before TensorFlow is imported. Four threads even on a small machine, so that what is split over threads gets split.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "4")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Files of which each takes minutes: the last of them would run alone.
_LONG = (
    "test_tf_keras.py",
    "test_deepctr_example.py",
    "test_failures.py",
    "test_scripts.py",
    "test_deepctr.py",
    "test_elastic.py",
)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with a reason, what this machine cannot run; says what must stay in one process of pytest-xdist."""
    items.sort(key=_is_short)  # what takes longest begins first
    for item in items:
        # A file, or all files that share the jobs of tests/multiprocess, which run once a process.
        item.add_marker(pytest.mark.xdist_group("shared jobs" if _shares_jobs(item) else str(item.path)))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and CuPy"))
        if item.get_closest_marker("multiprocess") and importlib.util.find_spec("horovod") is None:
            item.add_marker(pytest.mark.skip(reason="needs Horovod"))


def pytest_collection_finish() -> None:
    """Libraries and tests, once loaded, are no garbage: half a million objects that no collection looks at again."""
    gc.freeze()
    gc.set_threshold(10_000)  # as in multiprocess/worker.py
    if "tensorflow" in sys.modules:
        with_short_stacks()


def pytest_sessionfinish() -> None:
    if forking.shared.cache_info().currsize:
        forking.shared().close()


def _shares_jobs(item: pytest.Item) -> bool:
    return item.path.parent.name == "multiprocess" and "job" in getattr(item, "fixturenames", ())


def _is_short(item: pytest.Item) -> tuple[bool, bool]:
    return not _shares_jobs(item), item.path.name not in _LONG


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to run with groups that pytest-xdist cannot name: jobs of several workers would run once a process."""
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(
            f"pytest {pytest.__version__} does not let pytest-xdist group tests. Install the versions of "
            "requirements/constraints.txt (make setup does), or run without --dist loadgroup."
        )


@functools.cache
def _has_gpu() -> bool:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, no driver, no device
        return False


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A file of tests begins without a job, and leaves the process as it was: none depends on what ran before it."""
    _end_job()
    before = _settings()
    yield
    _end_job()
    assert _settings() == before, "a test of this file has left the process with other settings"


def _end_job() -> None:
    if "sok.job.context" in sys.modules:
        sys.modules["sok.job.context"].shutdown()


def _settings() -> dict[str, Any]:
    """What tests are tempted to set for a whole process. A library that is not loaded has its defaults."""
    ours = ("SOK_", "HOROVOD_", "CUDA_VISIBLE_DEVICES", "OMPI_", "PMI_", "TF_USE_LEGACY_KERAS")
    found: dict[str, Any] = {name: value for name, value in os.environ.items() if name.startswith(ours)}
    found |= {"folder": os.getcwd(), "eager": True, "keras": ("float32", "float32"), "tf_keras": ("float32", "float32")}
    if "tensorflow" in sys.modules:
        found["eager"] = sys.modules["tensorflow"].executing_eagerly()
    if "keras.config" in sys.modules:
        config = sys.modules["keras.config"]
        found["keras"] = config.floatx(), config.dtype_policy().name
    if "tf_keras.mixed_precision" in sys.modules:
        library = sys.modules["tf_keras"]
        found["tf_keras"] = library.backend.floatx(), library.mixed_precision.global_policy().name
    return found


@pytest.fixture(scope="session")
def forked() -> forking.Forked:
    """Runs programs in processes that need not load TensorFlow: forked.run(text or file, folder, *arguments)."""
    return forking.shared()


@pytest.fixture(scope="session")
def deepctr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with DeepCTR alone, to be put on the path of a program."""
    requirements = Path(__file__).resolve().parents[1] / "requirements" / "deepctr.txt"
    folder = tmp_path_factory.mktemp("deepctr")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "-r", requirements]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"DeepCTR cannot be had: {done.stderr[-300:]}")
    return folder


@pytest.fixture
def seed() -> int:
    """The one seed of a test's random numbers. Set SOK_TEST_SEED to try another."""
    return int(os.environ.get("SOK_TEST_SEED", "20260101"))


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(params=["eager", "function"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls a TensorFlow function as it stands, or inside a `tf.function`: call(f, *tensors)."""
    import tensorflow as tf

    if request.param == "eager":
        return lambda f, *args: f(*args)
    return lambda f, *args: tf.function(f)(*args)


def pytest_ignore_collect(collection_path, config):
    """Keeps --doctest-modules to files that hold tests: it imports what it looks at, and scripts that tests start in
    processes of their own (they switch TensorFlow to graphs, or train for ever) must not run in this one."""
    name = collection_path.name
    if collection_path.suffix == ".py" and not name.startswith("test_") and name not in ("conftest.py", "__init__.py"):
        return True
    return None
