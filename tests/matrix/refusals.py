"""Cells that cannot be: what the library says instead, and why it has to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.matrix.kinds import Kind


@dataclasses.dataclass(frozen=True)
class Refusal:
    operations: tuple[str, ...]
    of: Callable[[Kind, str], bool]  # (kind, rule)
    error: type[Exception] | tuple[type[Exception], ...]
    words: tuple[str, ...]  # the message has all of them
    why: str


# None today: what was refused once has been repaired.
REFUSALS: list[Refusal] = []


def refusal_of(kind: Kind, rule: str, operation: str) -> Refusal | None:
    return next((r for r in REFUSALS if operation in r.operations and r.of(kind, rule)), None)
