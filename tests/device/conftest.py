"""A TensorFlow device that is the CUDA emulator, for kernels of GPUs where there is none.

These tests need the library `sok_ops_emulated`, named by SOK_NATIVE_DIR, and a process of their own:
scripts/test_device.sh. Elsewhere they are not collected.
"""

from __future__ import annotations

import os

import pytest

EMULATED_GPU = "/EMULATED_GPU:0"

_IS_EMULATED = os.path.exists(os.path.join(os.environ.get("SOK_NATIVE_DIR", ""), "emulated"))

collect_ignore_glob = [] if _IS_EMULATED else ["test_*.py"]


def load_emulated_gpu() -> str:
    """Gives TensorFlow the device; before anything is computed. Returns its name."""
    from tensorflow.python.framework import load_library

    from sok.base import _ops

    _ops.lib()  # first, so that TensorFlow learns of the ops
    load_library.load_pluggable_device_library(str(_ops.library_path()))
    return EMULATED_GPU


if _IS_EMULATED:
    load_emulated_gpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the CPU that train by a stock optimizer, which tables refuse here (test_tables.py)."""
    here = os.path.dirname(__file__)
    stock = [item for item in items if str(item.path).startswith(here) and "Nadam]" in item.name]
    if stock:
        config.hook.pytest_deselected(items=stock)
        items[:] = [item for item in items if item not in stock]


@pytest.fixture(params=["/CPU:0", EMULATED_GPU])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
