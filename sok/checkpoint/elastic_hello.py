"""What workers of an elastic job say when they meet, and what follows from it: from where all go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sok.table.placement import Placement


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a worker says of itself when a job begins."""

    token: str
    is_committed: bool
    size: int
    rank: int
    names: list[Any]
    placements: list[dict[str, Any]]
    values: dict[str, Any]
    saved: int  # number of the commit in the files; -1: there is none
    proposal: str
    is_of_before: bool  # its tables are of a job that has ended
    rows_before: int  # that these hold
    number: int  # of its last commit
    holds: list[list[Any]]  # `Replicas.holds`
    host: str


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A commit whose rows are there, with workers or with their neighbours."""

    number: int
    token: str
    workers: tuple[int, ...]  # of each rank that it was made by, who brings its rows now


def newest(holds: Sequence[Sequence[Sequence[Any]]]) -> InMemory | None:
    """The last commit of which all rows are there, from what each worker holds.

    Once a commit is agreed upon, every worker holds it, and rows that are there of an older one are there of it, too:
    so none that counts is passed over. One that is newer is whole as well, if all of its rows are there.

    Example: of three workers the one of rank 1 is gone; rank 2 keeps its rows, and holds one that was not agreed upon.
        >>> newest([[[7, "a", 3, [0, 2]]], [[7, "a", 3, [2, 1]], [8, "b", 3, [2, 1]]]])
        InMemory(number=7, token='a', workers=(0, 1, 1))
    """
    found: dict[tuple[int, str, int], dict[int, int]] = {}
    for worker, its in enumerate(holds):
        for number, token, size, (own, kept) in its:
            of_ranks = found.setdefault((number, token, size), {})
            of_ranks[own] = worker
            of_ranks.setdefault(kept, worker)
    whole = [(key, ranks) for key, ranks in found.items() if len(ranks) == key[2]]
    if not whole:
        return None
    (number, token, size), ranks = max(whole, key=lambda one: one[0])
    return InMemory(number, token, tuple(ranks[rank] for rank in range(size)))


def fitting(placement: Placement, size: int) -> Placement:
    """A placement, with ranks that are not there taken modulo the number of workers."""
    config = placement.get_config()
    if config.get("owner") is not None:
        config["owner"] %= size
    if config.get("owners") is not None:
        config["owners"] = [owner % size for owner in config["owners"]]
    return Placement.from_config(config)
