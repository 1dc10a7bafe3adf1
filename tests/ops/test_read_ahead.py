"""The ops that read rows of tables over files ahead of their step: which rows, and how many."""

import numpy as np
import pytest
import tensorflow as tf

from sok.base import _ops
from tests.messages import saying
from tests.ops.tables import NativeTable
from tests.ops.worlds import World, rows
from tests.reference.exchange import all_to_all

FRAMES, ROWS = 60, 4_000  # that are in memory, and that there are


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setenv("SOK_STORAGE_FRAMES", str(FRAMES))
    monkeypatch.setenv("SOK_STORAGE_SEGMENT_BYTES", "8192")


def stored(folder, **options):
    return NativeTable(dim=3, capacity=1 << 16, storage_memory_bytes=2**24, storage_path=str(folder), **options)


def counts(table):
    """Hits, misses, and rows that were read ahead."""
    return _ops.lib().sok_table_storage(table.handle).numpy()[2:5]


def test_rows_of_one_worker_are_read_into_memory(call, tmp_path):
    table, other = stored(tmp_path), stored(tmp_path, key_dtype=tf.uint32)
    for one in (table, other):
        one.lookup(np.arange(ROWS))
    keys = [table.keys([1, 2, 3, 2, ROWS + 9]), other.keys([4, 5]), table.keys([3, 7])]
    before = [counts(one) for one in (table, other)]

    def ahead(*keys):
        _ops.lib().sok_read_ahead([table.handle, other.handle, table.handle], list(keys), batches=1)
        return tf.constant(0)

    call(ahead, *keys)
    assert [(counts(one) - b).tolist() for one, b in zip((table, other), before, strict=True)] == [[0, 0, 4], [0, 0, 2]]
    expected = NativeTable(dim=3).lookup([7, 1], insert=False)[0]
    np.testing.assert_array_equal(table.lookup([7, 1], insert=False)[0], expected)
    assert (counts(table) - before[0]).tolist() == [2, 0, 4]
    assert int(table.size()) == ROWS


def test_no_more_is_read_than_leaves_room_for_the_step(tmp_path):
    table = stored(tmp_path)
    table.lookup(np.arange(ROWS))
    for batches, most in (1, FRAMES // 2), (2, FRAMES // 3), (1000, 0):
        before = counts(table)
        _ops.lib().sok_read_ahead([table.handle], [table.keys(np.arange(1000, 3000))], batches=batches)
        assert 0 <= (counts(table) - before)[2] <= most


def test_rows_that_peers_ask_for_are_read_into_memory(call, tmp_path):
    world = World(2)
    world.shards = [[stored(tmp_path, world_size=2, rank=rank, seed=0)] for rank in range(2)]
    in_memory = World(2)
    for first in range(0, ROWS, 500):
        world.rows([np.arange(first, first + 500)] * 2)
    features = [[rows([1, 2, 3]), (0, [4, 6, 8], [0, 1, 3], None, "sum")], [rows([2, 11]), rows([2, ROWS + 8])]]
    features[1][1] = (0, [2, ROWS + 8], [0, 1, 2], None, "sum")
    routed = [world.route(rank, asked) for rank, asked in enumerate(features)]
    received = list(
        zip(*all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed]), strict=True)
    )
    before = [counts(world.shards[rank][0]) for rank in range(2)]

    def ahead(rank, words, splits, insert=True):
        _ops.lib().sok_exchange_read_ahead(
            world.handles(rank), words, splits, 0, insert, dims=[3], batches=1, **world.attributes((0, 0))
        )
        return tf.constant(0)

    for rank, (words, splits) in enumerate(received):
        call(lambda words, splits, rank=rank: ahead(rank, words, splits), words, splits)
        come = counts(world.shards[rank][0]) - before[rank]
        assert come.tolist() == [0, 0, [4, 3][rank]]  # 2, 4, 6, 8; 1, 3, 11
        ahead(rank, words[:-1], splits)  # the step says what is wrong with a message
        ahead(rank, words, splits, insert=False)
        assert (counts(world.shards[rank][0]) - before[rank]).tolist() == come.tolist()
    with_file, without = (one.lookup(features) for one in (world, in_memory))
    for one, other in zip(with_file, without, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert all((counts(world.shards[rank][0]) - before[rank])[1] == 0 for rank in range(2))


def test_what_makes_no_sense_is_refused():
    table, read = NativeTable(dim=3), _ops.lib().sok_read_ahead
    table.lookup([1])
    read([table.handle], [table.keys([1, 5])], batches=1)  # in memory: there is nothing to read
    assert int(table.size()) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="`keys` must have one tensor per table"):
        read([table.handle], [table.keys([1]), table.keys([2])], batches=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("item", "keys must be int64", "int32")):
        read([table.handle], [tf.constant([1])], batches=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="batches"):
        read([table.handle], [table.keys([1])], batches=0)
