"""The public names of the library and their arguments as text, one a line: `sok.compact(path, *, progress=None)`."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

# Modules whose names users import by the module, beside what `sok` has.
MODULES = (
    *("optimizers", "callbacks", "hooks", "communication", "feature_column", "layers", "deeprec", "checkpoint"),
    *("saved_model", "cuda", "tf.keras.optimizers"),
)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SIMPLE = (bool, int, float, str, type(None))


def listed() -> list[str]:
    """One line for each name, method and property."""
    lines: set[str] = set()
    known: list[Any] = []  # classes whose members are listed, once
    for module_name in ("sok", *(f"sok.{name}" for name in MODULES), "sparse_operation_kit"):
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", None) or [n for n in dir(module) if _is_of(module, n)]:
            value = getattr(module, name)
            lines |= set(_of(f"{module_name}.{name}", value, value not in known))
            known.append(value)
    return sorted(lines)


def _is_of(module: types.ModuleType, name: str) -> bool:
    return not name.startswith("_") and getattr(getattr(module, name), "__module__", None) == module.__name__


def _of(name: str, value: Any, with_members: bool) -> Iterator[str]:
    if isinstance(value, type):
        yield f"{name}{_arguments(value.__init__, 1)}"
        if not with_members:
            return
        for member in sorted(dir(value)):
            owner = next((cls for cls in value.__mro__ if member in vars(cls)), None)
            if member.startswith("_") or owner is None or not owner.__module__.startswith("sok"):
                continue
            found = inspect.getattr_static(value, member)
            if callable(getattr(value, member)):
                skipped = 0 if isinstance(found, (staticmethod, classmethod)) else 1
                yield f"{name}.{member}{_arguments(getattr(value, member), skipped)}"
            else:
                yield f"{name}.{member}"
    elif callable(value):
        yield f"{name}{_arguments(value, 0)}"
    else:
        yield name


def _arguments(function: Any, skipped: int) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())[skipped:]
    except (TypeError, ValueError):
        return "(*args, **kwargs)"
    shown = [
        p.replace(annotation=p.empty, default=_default(p.default))
        for p in parameters
        if not p.name.startswith("_") or p.kind in _REST
    ]
    return str(inspect.Signature(shown))


def _default(value: Any) -> Any:
    return value if value is inspect.Parameter.empty or isinstance(value, _SIMPLE) else ...
