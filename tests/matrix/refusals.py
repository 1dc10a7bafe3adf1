"""Kinds of tables that cannot be: what the library says instead, and why it has to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.matrix.kinds import Kind


@dataclasses.dataclass(frozen=True)
class Refusal:
    of: Callable[[Kind], bool]
    error: type[Exception]
    words: tuple[str, ...]  # the message has all of them
    why: str


REFUSALS = [
    Refusal(
        of=lambda kind: kind.placement.endswith("by hash") and not kind.hashed,
        error=ValueError,
        words=("`placement`", "row_wise()", "hashed=True"),
        why="Row numbers fill shards of one capacity evenly; a hash sends one more than it has room for.",
    )
]


def refusal_of(kind: Kind) -> Refusal | None:
    return next((refusal for refusal in REFUSALS if refusal.of(kind)), None)
