"""Modules of `sok` under a second name."""

from __future__ import annotations

import importlib
import sys


def alias(name: str, target: str, *submodules: str) -> None:
    """Makes `import name` give the module `target`, not a copy of it: the same classes under both names.

    Args:
        name: of the module that calls this while it is imported.
        target: the module that takes its place.
        submodules: of `target` that can be imported under `name` too, as 'a' and 'a.b'.
    """
    for submodule in ("", *(f".{s}" for s in submodules)):
        # The import system takes from here what it gives to the caller.
        sys.modules[name + submodule] = importlib.import_module(target + submodule)
