"""The way of a key: ids of some features, the exchange, the rows or sums that come home, and their gradient."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # The module of this name in SOK 2.1 has these two.
    if name in ("lookup_sparse", "all2all_dense_embedding"):
        return getattr(importlib.import_module("sok"), name)
    raise AttributeError(f"module 'sok.lookup' has no attribute {name!r}")
