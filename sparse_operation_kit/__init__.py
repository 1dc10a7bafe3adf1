"""`sok` under the name that scripts for NVIDIA's Sparse Operation Kit import.

    import sparse_operation_kit as sok

Every public name of `sok` is here, the same object, and so are the modules where SOK 1.1 and 2.1 had their names, as
far as `sok` has these (docs/migrating.md). The package of SOK itself has this name too: an environment holds one of
them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import sok
from sparse_operation_kit._modules import ALIASES, NAMES, Finder

__all__ = [*sok.__all__, "core", "embeddings", "experiment", "saver"]

__version__ = sok.__version__

sys.meta_path.insert(0, Finder())

# Modules of this package that a script may use without importing them. Those that `sok` has too are its own.
_MODULES = {*ALIASES, *NAMES, "embeddings", "experiment", "kit_lib"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"sparse_operation_kit.{name}")
    if name not in sok.__all__:
        raise AttributeError(f"module 'sparse_operation_kit' has no attribute {name!r}")
    value = globals()[name] = getattr(sok, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
