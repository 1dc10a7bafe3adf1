"""Tables on a GPU of TensorFlow: a real one, or a device that is the CUDA emulator, where there is none.

Elsewhere these tests are not collected. With the emulator they need the library `sok_ops_emulated`, named by
SOK_NATIVE_DIR, and a process of their own (scripts/test_device.sh); with a GPU, SOK_DEVICE_TESTS=GPU
(scripts/gpu_test.sh).
"""

from __future__ import annotations

import os

import pytest

IS_EMULATED = os.path.exists(os.path.join(os.environ.get("SOK_NATIVE_DIR", ""), "emulated"))
_IS_REAL = os.environ.get("SOK_DEVICE_TESTS") == "GPU"

GPU = "/EMULATED_GPU:0" if IS_EMULATED else "/GPU:0"

collect_ignore_glob = [] if IS_EMULATED else ["test_counts.py"] if _IS_REAL else ["test_*.py"]


def load_emulated_gpu() -> str:
    """Gives TensorFlow the device; before anything is computed. Returns its name."""
    from tensorflow.python.framework import load_library

    from sok.base import _ops

    _ops.lib()  # first, so that TensorFlow learns of the ops
    load_library.load_pluggable_device_library(str(_ops.library_path()))
    return GPU


def require_gpu() -> None:
    """Tests of a GPU that is not there must not pass."""
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        raise pytest.UsageError("SOK_DEVICE_TESTS=GPU asks for tests on /GPU:0, and TensorFlow sees no GPU.")


if IS_EMULATED:
    load_emulated_gpu()
elif _IS_REAL:
    require_gpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the CPU that train by a stock optimizer, which tables refuse here (test_tables.py)."""
    here = os.path.dirname(__file__)
    stock = [item for item in items if str(item.path).startswith(here) and "Nadam]" in item.name]
    if stock:
        config.hook.pytest_deselected(items=stock)
        items[:] = [item for item in items if item not in stock]


@pytest.fixture(params=["/CPU:0", GPU])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
