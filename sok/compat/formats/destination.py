"""Whether a table in files fits into a table of this job, found out before a row is stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sok.base.errors import FormatError, TableFull
from sok.compat.formats.columns import StoredTable, pieces
from sok.table.placement import Placement


@dataclass(frozen=True)
class Destination:
    """What there is to know of a table to be filled, without TensorFlow."""

    name: str
    dim: int
    key_dtype: np.dtype
    capacity: int
    num_keys: int | None  # legal are 0 <= key < num_keys; None: all
    rank: int
    world_size: int
    placement: Placement
    complete: bool = False  # whether each of num_keys keys must be there

    @property
    def label(self) -> str:
        return f"table '{self.name}'"

    def owns(self, keys: np.ndarray) -> np.ndarray:
        """[n] bool: which keys have their rows on this worker."""
        return self.placement.holds_keys(keys, self.rank, self.world_size)


def check_dim(stored: StoredTable, to: Destination) -> None:
    if stored.dim != to.dim:
        raise FormatError(
            f"{stored.rows.place(0)}: holds rows of {stored.dim} numbers. {to.label.capitalize()} has rows of {to.dim}."
        )


def keys_for(stored: StoredTable, to: Destination, start: int, stop: int) -> np.ndarray:
    """Keys [start, stop) in the table's dtype.

    Raises:
        FormatError: a key that the table cannot hold.
    """
    found = stored.keys.read(start, stop)
    keys = found.astype(to.key_dtype)
    # Casting wraps, and a wrapped key compares unequal, or has the other sign.
    _refuse(stored, to, start, found, (keys != found) | ((keys < 0) != (found < 0)), f"{to.key_dtype.name} keys")
    if to.num_keys is not None:
        bad = (keys < 0) | (keys.astype(np.uint64) >= np.uint64(to.num_keys))
        if bad.any():
            needed = max(int(found.max()) + 1, stored.num_rows)
            _refuse(
                stored,
                to,
                start,
                found,
                bad,
                f"row numbers for keys, below {to.num_keys}. More workers, each with its capacity, may have written "
                f"the file: on {to.world_size} workers make the table with a capacity (`max_vocabulary_size_per_gpu`) "
                f"of at least {to.placement.share(needed, to.world_size)}, and with `num_keys`, if it has that, of at "
                f"least {needed}",
            )
    return keys


def _refuse(
    stored: StoredTable, to: Destination, start: int, found: np.ndarray, bad: np.ndarray, accepted: str
) -> None:
    if bad.any():
        first = int(np.argmax(bad))
        raise FormatError(
            f"{stored.keys.place(start + first)}: holds key {found[first]}. {to.label.capitalize()} takes {accepted}."
        )


def own_keys(stored: StoredTable, to: Destination) -> np.ndarray:
    """The keys whose rows belong on this worker, sorted. Reads all keys.

    Raises:
        FormatError: a key that the table cannot hold, a key of this worker that is there twice, or keys missing of
            those that must be there.
    """
    check_dim(stored, to)
    if to.complete and stored.num_rows != to.num_keys:
        raise FormatError(
            f"{stored.keys.place(0)}: holds {stored.num_rows} keys. {to.label.capitalize()} has {to.num_keys} rows, "
            "and all must be there."
        )
    parts = [np.zeros(0, to.key_dtype)]
    for start, stop in pieces(stored.num_rows, 2):
        keys = keys_for(stored, to, start, stop)
        parts.append(keys[to.owns(keys)])
    mine = np.concatenate(parts)
    mine.sort()
    twice = mine[1:] == mine[:-1]
    if twice.any():
        key = mine[1:][twice][0]
        raise FormatError(f"{_places(stored, to, key)}: hold key {key} more than once. Which row is meant?")
    return mine


def _places(stored: StoredTable, to: Destination, key: int) -> str:
    found = []
    for start, stop in pieces(stored.num_rows, 2):
        found += [start + int(i) for i in np.flatnonzero(keys_for(stored, to, start, stop) == key)]
        if len(found) > 1:
            break
    return f"{stored.keys.place(found[0])} and {stored.keys.place(found[1])}"


def check_room(to: Destination, num_in_use: int, num_new: int) -> None:
    """Raises `TableFull` if `num_new` more rows do not fit."""
    if num_in_use + num_new > to.capacity:
        raise TableFull(
            f"{to.label} (rank {to.rank} of {to.world_size}) has {num_in_use} of at most {to.capacity} rows, and "
            f"{num_new} new ones were to come. Nothing was stored. Make it with a larger "
            "capacity (`max_vocabulary_size_per_gpu`), or on more workers."
        )
