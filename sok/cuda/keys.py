"""Keys on the device: distinct ones, and which rank owns which."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from sok.cuda import _arrays, _native
from sok.cuda._arrays import Array
from sok.table.placement import Placement, row_wise

ORDERS = ("first_appearance", "any")


class Unique(NamedTuple):
    """Distinct keys `[U]`, for each key its place among them `[N]`, and how often each occurs `[U]`."""

    keys: Any
    inverse: Any
    counts: Any


def _in_order(order: str) -> bool:
    if order not in ORDERS:
        raise ValueError(f"`order` must be one of {ORDERS}. Received: {order!r}.")
    return order == "first_appearance"


def unique_padded(keys: Array, *, order: str = "first_appearance") -> tuple[Unique, Any]:
    """Finds distinct keys. In stream order; does not wait.

    Args:
      keys: `[N]` int64, uint64, int32 or uint32; every value is a key. N may be 0, and is below 2^31.
      order: "first_appearance" repeats bit for bit; "any" gives distinct keys in no particular order, a little faster.

    Returns:
      (Unique, num_unique): arrays of length N of which the first num_unique `[1]` (int64, on the device) are written;
      all of inverse is. Behind them counts are 0.

    Raises:
      TypeError, ValueError: arguments of another dtype or shape.
    """
    in_order = _in_order(order)
    given, dtype = _arrays.words_and_dtype("keys", keys)
    n = len(given)
    found, inverse = _arrays.empty(n, np.uint64), _arrays.empty(n, np.uint32)
    counts, num = _arrays.empty(n, np.uint32), _arrays.empty(1, np.int64)
    _native.call("unique", given, n, in_order, found, inverse, counts, num)
    return Unique(_arrays.keys_of(found, dtype), inverse, counts), num


def unique(keys: Array, *, order: str = "first_appearance") -> Unique:
    """Finds distinct keys, as `tf.unique_with_counts`. In stream order; waits, to know how many there are.

    Args, Raises: as `unique_padded`.

    Example (NumPy arrays stand for CuPy's where the library is the emulator):
        >>> unique(cupy.array([7, 3, 7]))  # doctest: +SKIP
        Unique(keys=array([7, 3]), inverse=array([0, 1, 0], dtype=uint32), counts=array([2, 1], dtype=uint32))
    """
    found, num = unique_padded(keys, order=order)
    _native.call("synchronize")
    count = int(num[0])
    return Unique(found.keys[:count], found.inverse, found.counts[:count])


class Partitioned(NamedTuple):
    """Keys sorted by owner `[N]`, `keys[positions]`; where each went: `sorted_keys[places]` gives the keys back; and
    how many each rank owns `[R]`."""

    keys: Any
    positions: Any
    places: Any
    counts: Any


def partition_keys(
    keys: Array, world_size: int, *, owner: int | None = None, placement: Placement | None = None
) -> Partitioned:
    """Sorts keys by the rank that owns them, as `placement` says, or all of them `owner`, or `key % world_size`.

    Keys of one rank stay in the order they came. Deterministic; in stream order; does not wait.

    Raises:
      TypeError, ValueError: keys of another dtype or shape; a world size below 1; an owner that is no rank.
    """
    given, dtype = _arrays.words_and_dtype("keys", keys)
    n = len(given)
    moved = _arrays.empty(n, np.uint64)
    positions, places = _arrays.empty(n, np.uint32), _arrays.empty(n, np.uint32)
    counts = _arrays.empty(max(world_size, 0), np.int64)
    owner = (placement or row_wise()).to_attributes(world_size)["owner"] if owner is None else owner
    of_ranks = ctypes.c_int(world_size), ctypes.c_int(owner), dtype.kind == "u"
    _native.call("partition_keys", given, n, *of_ranks, moved, positions, places, counts)
    return Partitioned(_arrays.keys_of(moved, dtype), positions, places, counts)
