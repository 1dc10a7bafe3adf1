"""A table whose keys wait for rows and leave again, and what it holds after each step: a function of its number alone.

Step n holds the keys n to n + window - 1: one goes and one comes with every step. A key has its row in the second step
that holds it, and leaves `OLDER` steps after the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.base import _ops
from sok.table.counted import with_counted
from sok.table.state import count_step

OLDER = 3
POLICIES: dict[str, Any] = {
    "admission": sok.Admission(after=2),
    "eviction": sok.Eviction(older_than=OLDER, every=1),
}


def step(table: Any, number: int, window: int) -> None:
    """Counts what this worker has of the step's keys, then writes to a quarter of the rows."""
    keys = np.arange(number, number + window)
    mine = tf.constant(keys[keys % table.world_size == table.rank])
    _ops.lib().sok_table_lookup(table.handle, mine, True, dim=table.dim)
    count_step([table])
    keys, counts, _ = _seen(number, window)
    keys = keys[(counts > 1) & (keys % 4 == number % 4)]
    table.assign(keys, np.full([len(keys), table.dim], number, np.float32))


def look(table: Any, number: int, window: int, rank: int, size: int) -> None:
    """Compares all that this worker has with what step `number` leaves."""
    keys, counts, lasts = (of_all[_seen(number, window)[0] % size == rank] for of_all in _seen(number, window))
    values = number - (number - keys) % 4  # when a row was written last, if it was there
    there = (values >= np.maximum(1, keys - window + 1) + 1) & (values <= keys + OLDER - 1)
    expected = np.repeat(np.where(there, values, 0)[:, None], table.dim, 1).astype(np.float32)
    has_row = counts > 1
    found, rows = (tensor.numpy() for tensor in table.export())
    order = np.argsort(found)
    np.testing.assert_array_equal(found[order], keys[has_row])
    np.testing.assert_array_equal(rows[order], expected[has_row])
    waiting = with_counted({"": table})["/sok.candidates"].export()[0].numpy()
    np.testing.assert_array_equal(np.sort(waiting), keys[~has_row])
    for of_table, of_step in zip(table.history(keys), (counts, lasts), strict=True):
        np.testing.assert_array_equal(np.asarray(of_table), of_step)
    assert int(table.step) == number


def _seen(number: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys that are known after a step, ascending; in how many steps they were, and in which last."""
    keys = np.arange(max(1, number - OLDER + 1), number + window)
    lasts = np.minimum(number, keys)
    return keys, lasts - np.maximum(1, keys - window + 1) + 1, lasts
