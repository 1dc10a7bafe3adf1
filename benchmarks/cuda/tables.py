"""Cases of hashed tables: find, find or insert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sok.cuda
from benchmarks.cuda.measure import Case, Device

DIM = 64
LINE = 128  # bytes of the least that a place of the hash table can be read in


def cases(device: Device) -> Iterator[Case]:
    """Keys are whole numbers times an odd one: all distinct, and spread over 64 bits."""
    table_keys, n = (2000, 300) if device.emulate else (1 << 27, 1 << 20)
    table = sok.cuda.Table("benchmark", dim=DIM, capacity=table_keys + n)
    table.reserve(table_keys + n)
    chunk = min(table_keys, 1 << 22)
    for first in range(0, table_keys, chunk):
        table.find_or_insert(_keys(device, device.xp.arange(first, min(first + chunk, table_keys))))
    table.check()
    rng = np.random.default_rng(5)
    present = _keys(device, device.put(rng.integers(0, table_keys, n)))
    fresh = _keys(device, device.xp.arange(table_keys, table_keys + n))
    half = device.xp.where(device.put(rng.random(n) < 0.5), present, fresh)
    label = f"of {n:,} keys in a table of {table_keys:,}"

    yield Case(
        f"find {label}, rows of {DIM} floats",
        n,
        "keys",
        n * (8 + LINE + 8 + 2 * 4 * DIM),
        "key, one line of the index and the row read; row and row id written",
        lambda: table.lookup(present, insert=False),
        goal="4.5 G/s",
    )
    yield Case(
        f"find {label}, addresses only",
        n,
        "keys",
        n * (8 + LINE + 8),
        "key and one line of the index read; row id written",
        lambda: table.find(present),
        goal="7 G/s",
    )
    yield Case(
        f"find or insert {label}, all there",
        n,
        "keys",
        n * (8 + LINE + 8),
        "key and one line of the index read; row id written",
        lambda: table.find_or_insert(present),
        goal="2.5 G/s",
    )
    for keys, name, new in ((half, "half of them new", n // 2), (fresh, "all new", n)):

        def insert(keys: Any = keys) -> None:
            table.find_or_insert(keys)

        yield Case(
            f"find or insert {label}, {name}",
            n,
            "keys",
            n * (8 + LINE + 8) + new * (LINE + 4 * DIM),
            "key and one line of the index read; row id, and for new keys the line and a fresh row, written",
            insert,
            goal="2.5 G/s",
            before=lambda: table.erase(fresh),
        )


def _keys(device: Device, numbers: Any) -> Any:
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
