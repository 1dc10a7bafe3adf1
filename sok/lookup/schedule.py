"""When the phases of a lookup run, if not all in its step."""

from __future__ import annotations

import dataclasses
import itertools

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How far ahead of its step a lookup begins, and what travels then.

    Args:
        depth: how many batches at the most have begun before their turn, at least 1.
        rows: whether rows travel ahead as well as keys. Those that have changed by the turn of their step are sent
            again in it.
        stale: None, or a number of steps, at least `depth`: rows travel ahead and are not sent again, so a step has
            them as they were at most so many steps before.

    Raises:
        ValueError, TypeError: of an argument.

    Example:
        >>> Schedule(2, rows=True)
        Schedule(depth=2, rows=True, stale=None)
        >>> Schedule(2, stale=2).sends_rows
        True
    """

    depth: int = 1
    rows: bool = False
    stale: int | None = None

    def __post_init__(self) -> None:
        _check_number("depth", self.depth)
        if not isinstance(self.rows, bool):
            raise TypeError(f"`rows` must be True or False. Received: {self.rows!r}.")
        if self.stale is None:
            return
        _check_number("stale", self.stale)
        if self.stale < self.depth:
            raise ValueError(
                f"`stale` must be at least `depth`, {self.depth}: the rows of a batch are as old as its ticket. "
                f"Received: {self.stale}."
            )

    @property
    def sends_rows(self) -> bool:
        """Whether rows travel ahead."""
        return self.rows or self.stale is not None


def next_number() -> int:
    """Of what begins lookups ahead: the same on all workers, if they make theirs in the same order."""
    return next(_numbers)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be a whole number, at least 1. Received: {value!r}.")
