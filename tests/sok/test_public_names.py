"""What users of commit 3b85c57 could call, they can call today with the same arguments."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path

import sok

LIST = Path(__file__).parents[1] / "data" / "written_by_3b85c57" / "public_names.txt"
REMOVED: dict[str, str] = {}  # on purpose: the name, and why


def _found(name: str):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            owner, value = value, getattr(value, part)
        return value, owner if cut < len(parts) and isinstance(owner, type) else None
    raise ImportError(name)


def _signature(value, owner):
    skipped = 0
    if isinstance(value, type):
        value, skipped = value.__init__, 1
    elif owner is not None and not inspect.ismethod(value):
        skipped = 1
    return list(inspect.signature(value).parameters.values())[skipped:]


def _refused(then: inspect.Parameter, place: int, now: list[inspect.Parameter]) -> str | None:
    """Why a call that gave this argument no longer works."""
    by_name = {p.name: p for p in now}
    rest = {p.kind for p in now}
    if then.kind in (then.VAR_POSITIONAL, then.VAR_KEYWORD):
        return None if then.kind in rest else f"takes no {then}"
    positional = [p for p in now if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if then.name not in by_name:
        if then.VAR_KEYWORD not in rest:
            return f"takes no `{then.name}`"
        if any(p.name == "properties" for p in now) and then.name not in (*_OPTIONS, "owner"):
            return f"takes no `{then.name}`"
    elif (by_name[then.name].default is then.empty) > (then.default is then.empty):
        return f"needs `{then.name}`"
    if then.kind is then.KEYWORD_ONLY or then.VAR_POSITIONAL in rest:
        return None
    if place >= len(positional) or positional[place].name != then.name:
        return f"takes `{then.name}` no longer as its argument {place}"
    return None


_OPTIONS = [field.name for field in dataclasses.fields(sok.TableOptions)]


def test_each_name_is_there_and_takes_what_it_took():
    wrong = []
    lines = LIST.read_text().splitlines()
    assert len(lines) > 500
    for line in lines:
        name, bracket, arguments = line.partition("(")
        try:
            value, owner = _found(name)
        except (ImportError, AttributeError) as error:
            wrong += [] if name in REMOVED else [f"{line}: {error}"]
            continue
        if not bracket:
            continue
        then = list(inspect.signature(eval(f"lambda {arguments[:-1]}: None")).parameters.values())
        now = _signature(value, owner)
        wrong += [f"{line}: {why}" for place, p in enumerate(then) if (why := _refused(p, place, now))]
        new = [p.name for p in now if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        wrong += [f"{line}: needs `{p}`" for p in new if p not in {p.name for p in then}]
    assert not wrong, "\n".join(wrong)
