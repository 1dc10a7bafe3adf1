"""Sizes at which counters and offsets of 32 bits overflow.

On any device with the memory for it; in the emulator only with SOK_TEST_SLOW=1, since these take minutes there.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.reference.initial_values import Initializer, initial_row

GIB = 2**30


@pytest.fixture
def large(cuda: Any) -> Any:
    """The backend, if it is to run these; `needs(gib)` skips where there is less memory."""
    if cuda.name == "emulated" and not os.environ.get("SOK_TEST_SLOW"):
        pytest.skip("takes minutes in the emulator; set SOK_TEST_SLOW=1")
    return cuda


def needs(backend: Any, gib: float) -> None:
    if backend.name == "emulated":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        free = cupy.cuda.runtime.memGetInfo()[0]
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free memory; there are {free / GIB:.1f}")


def test_a_table_of_more_than_4_gib(large):
    import sok.cuda

    needs(large, 6)
    dim, row_bytes = 4096, 4 * 4096
    count = 2**32 // row_bytes + 700  # rows; the last ones begin behind 2^32 bytes
    table = sok.cuda.Table("large", dim=dim, capacity=count, seed=11)
    table.reserve(count)
    keys = np.arange(count) * 7 - 5
    for part in np.array_split(keys, 8):
        table.find_or_insert(large.put(part))
    assert table.size() == count and table.memory_bytes() > 2**32
    places = np.array([0, 1, 2**31 // row_bytes, 2**32 // row_bytes - 1, 2**32 // row_bytes, count - 1])
    found = table.lookup(large.put(keys[places]), insert=False)
    assert large.get(found.row_ids).tolist() == places.tolist()
    fresh = np.stack([initial_row(Initializer(), 11, int(key), dim) for key in keys[places]])
    np.testing.assert_array_equal(large.get(found.rows), fresh)
    table.apply("sgd", [0.5], found.row_ids, large.put(np.ones((len(places), dim), np.float32)))
    moved = table.lookup(large.put(keys[places]), insert=False).rows
    np.testing.assert_array_equal(large.get(moved), fresh - np.float32(0.5))
    beside = table.lookup(large.put(keys[places[2:5] + 1]), insert=False).rows  # two of them nobody has touched
    untouched = [initial_row(Initializer(), 11, int(key), dim) for key in keys[places[[2, 4]] + 1]]
    np.testing.assert_array_equal(large.get(beside)[[0, 2]], untouched)
    table.check()


def test_an_output_of_more_than_2_31_floats(large):
    import sok.cuda

    needs(large, 10)
    dim = 4096
    n = 2**31 // dim + 3
    rows = np.arange(50, dtype=np.float32)[:, None] + np.zeros(dim, np.float32)
    index = np.arange(n) % 50
    out = sok.cuda.combine(large.put(rows), large.put(index))
    assert out.shape == (n, dim)
    for i in (0, 1, n // 2, n - 4, n - 3, n - 2, n - 1):  # elements 2^31 - dim and on are the last three rows
        np.testing.assert_array_equal(large.get(out[i]), rows[index[i]])


@pytest.mark.parametrize("deterministic", [True, False])
def test_segment_sums_of_more_than_2_31_floats(large, deterministic):
    import sok.cuda
    from sok.cuda import _arrays

    needs(large, 12)
    dim = 4096
    n = 2**31 // dim + 3
    data = _arrays.module().zeros((n, dim), np.float32)
    data[0], data[n // 2], data[n - 3 :] = 1.0, 2.0, 4.0
    ids = np.arange(n, dtype=np.int64) % 7
    sums = large.get(sok.cuda.unsorted_segment_sum(data, large.put(ids), 7, deterministic=deterministic))
    expected = np.zeros((7, dim), np.float32)
    for i, value in ((0, 1.0), (n // 2, 2.0), (n - 3, 4.0), (n - 2, 4.0), (n - 1, 4.0)):
        expected[ids[i]] += value
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.gpu
def test_distinct_keys_of_more_than_2_31_bytes():
    import cupy

    import sok.cuda

    backend = type("Device", (), {"name": "cuda"})
    needs(backend, 24)
    n = 2**28 + 1000
    keys = cupy.arange(n, dtype=np.int64) // 2 * 3
    found = sok.cuda.unique(keys)
    assert len(found.keys) == n // 2
    assert bool((found.keys == cupy.arange(n // 2) * 3).all())
    assert bool((found.inverse == cupy.arange(n, dtype=np.int64) // 2).all())
    assert bool((found.counts == 2).all())
