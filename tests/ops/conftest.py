from __future__ import annotations

from typing import Any

import pytest

from sok.base import _ops


@pytest.fixture(scope="session")
def lib() -> Any:
    """The module of native ops."""
    return _ops.lib()
