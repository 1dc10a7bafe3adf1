"""Placements that tests try, by the words that tests/reference/placement.py has for them. A new one joins by a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import sok
from sok.table.placement import Placement


@dataclasses.dataclass(frozen=True, repr=False)
class UpperRanks(Placement, kind="upper_ranks"):
    """A kind that is in no library: rows are on the upper half of the workers."""

    hash: bool = False

    def ranks(self, world_size: int) -> range:
        return range(world_size // 2, world_size)


# From the number of workers.
PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "by key": lambda size: sok.row_wise(),
    "by hash": lambda size: sok.row_wise(hash=True),
    "one worker": lambda size: sok.table_wise(size - 1),
    "upper workers": lambda size: sok.table_row_wise(1, hosts=2),
    "upper workers by hash": lambda size: sok.table_row_wise(1, hosts=2, hash=True),
}
# Those of which several workers hold each key: columns of its row, or copies.
WHOLE_PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "columns": lambda size: sok.column_wise([1, 1, 1], owners=[size - 1, 0, size - 1]),
    "copies": lambda size: sok.data_parallel(),
}
ALL_PLACEMENTS = {**PLACEMENTS, **WHOLE_PLACEMENTS}
