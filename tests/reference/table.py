"""A shard of an embedding table as a Python dict: `TableLookup`, `TableAssign`, `TableErase`, `TableApply`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.reference import combine as _combine
from tests.reference.exchange import owner
from tests.reference.initial_values import Initializer, initial_row


class TableFull(Exception):
    """The new keys of a call do not fit; nothing was stored."""


class IllegalKey(Exception):
    """The key is outside an identity table, or belongs to another rank."""


@dataclass
class Table:
    dim: int
    capacity: int
    init: Initializer = Initializer()
    seed: int = 0
    hashed: bool = True
    world_size: int = 1
    rank: int = 0
    rows: dict[int, np.ndarray] = field(default_factory=dict)

    def fresh(self, key: int) -> np.ndarray:
        return initial_row(self.init, self.seed, key, self.dim)

    def check(self, keys: np.ndarray) -> list[int]:
        for key in map(int, keys):
            if not self.hashed and not 0 <= key < self.capacity * self.world_size:
                raise IllegalKey(key)
        return [int(key) for key in keys]

    def lookup(self, keys: np.ndarray, insert: bool) -> np.ndarray:
        """Rows [N, dim]. With insert, new keys get their fresh row, all or none."""
        wanted = self.check(keys)
        if any(owner(key, self.world_size) != self.rank for key in wanted):
            raise IllegalKey(wanted)
        if insert:
            self._make(wanted)
        rows = [self.rows[key] if key in self.rows else self.fresh(key) for key in wanted]
        return np.array(rows, np.float32).reshape(len(wanted), self.dim)

    def lookup_combine(
        self, keys: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, combiner: str, insert: bool
    ) -> np.ndarray:
        rows = self.lookup(keys, insert)
        return _combine.combine(rows, np.arange(len(rows)), row_splits, weights, combiner)

    def assign(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Stores the rows of this rank's keys; the last of duplicates wins."""
        wanted = [(key, v) for key, v in zip(self.check(keys), values, strict=True) if self.owns(key)]
        self._make([key for key, _ in wanted])
        for key, value in wanted:
            self.rows[key] = np.array(value, np.float32)

    def erase(self, keys: np.ndarray) -> int:
        return sum(self.rows.pop(key, None) is not None for key in self.check(keys) if self.owns(key))

    def owns(self, key: int) -> bool:
        return owner(key, self.world_size) == self.rank

    def _make(self, keys: list[int]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self.rows]
        if len(self.rows) + len(new) > self.capacity:
            raise TableFull(new)
        for key in new:
            self.rows[key] = self.fresh(key)
