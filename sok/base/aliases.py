"""Modules under a second, public name."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def stand_for(name: str, target: str) -> Callable[[str], Any]:
    """Makes `import name` give the module `target`; to be called by module `name` while it is imported.

    Gives what that one needs as its `__getattr__`: who has imported it by its path has it and not `target`.
    """
    module = sys.modules[name] = importlib.import_module(target)
    return functools.partial(getattr, module)
