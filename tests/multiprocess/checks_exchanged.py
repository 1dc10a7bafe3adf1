"""What `stats` and TableScalars say of the bytes that lookups exchange, beside what follows from ids and dims."""

import numpy as np
import tensorflow as tf

import sok
from sok.base.tracing import collective_counts
from sok.job import context
from sok.lookup.feature import Feature
from sok.lookup.lookup import lookup_parts, lookup_rows

KEYS = 40  # of each worker's batch; some come twice


def batch(rank, step):
    return np.random.default_rng([rank, step]).integers(0, 60, KEYS)


def expected_bytes(world, dims, word, steps, gradients):
    """Of lookups of rows of so many tables by the same ids: docs/design/exchange.md, what it costs."""
    if world.size == 1:
        return 0
    ranks, tables, total = world.size, len(dims), 0
    for step in steps:
        distinct = sum(len(np.unique(batch(rank, step))) for rank in range(ranks))
        keys = word * (ranks * ranks * (7 + 3 * tables) + distinct * tables)
        rows = 4 * (16 * ranks * ranks + distinct * sum(dims))
        total += keys + rows * (2 if gradients else 1)
    return total


def exchanged(table):
    return table.stats(details=True)["bytes_exchanged"]


def check_bytes_of_a_table_follow_from_ids_and_dims(world):
    for key_dtype in ("int64", "int32"):
        checked(world, key_dtype)


def checked(world, key_dtype):
    table = sok.EmbeddingVariable(5, 100, name=f"told_{key_dtype}", key_dtype=key_dtype)
    optimizer, word = sok.optimizers.SGD(0.1), tf.as_dtype(key_dtype).size

    def train(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(table, ids))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    assert exchanged(table) == 0
    for function, steps in ((train, [0, 1]), (tf.function(train), [2, 3])):
        before = exchanged(table)
        for step in steps:
            function(tf.constant(batch(world.rank, step), key_dtype))
        assert exchanged(table) - before == expected_bytes(world, [5], word, steps, gradients=True)
    before = exchanged(table)
    lookup_rows(table, tf.constant(batch(world.rank, 4), key_dtype), training=False)
    collective_counts(reset=True)  # of others' counts, which this one outlives
    assert exchanged(table) - before == expected_bytes(world, [5], word, [4], gradients=False)
    table.assign(tf.constant([1], key_dtype), np.zeros([1, 5]))  # nobody is asked
    table.export()
    assert exchanged(table) - before == expected_bytes(world, [5], word, [4], gradients=False)


def check_tables_of_one_call_have_the_bytes_of_all(world):
    tables = [sok.EmbeddingVariable(dim, 100, name=f"told_{dim}") for dim in (3, 8)]
    ids = tf.constant(batch(world.rank, 0))
    lookup_parts([[Feature(table, ids) for table in tables]])
    assert [exchanged(table) for table in tables] == [expected_bytes(world, [3, 8], 8, [0], gradients=False)] * 2
    lookup_rows(tables[1], ids)
    alone = expected_bytes(world, [8], 8, [0], gradients=False)
    assert exchanged(tables[1]) - exchanged(tables[0]) == alone


def check_scalars_have_the_bytes_since_those_before(world, tmp_path_of_rank):
    table = sok.EmbeddingVariable(4, 100, name="told_scalars")
    scalars = sok.callbacks.TableScalars(tmp_path_of_rank / "scalars", tables=table, details=True)
    told = []
    for step in range(3):
        for _ in range(step):
            lookup_rows(table, tf.constant(batch(world.rank, step)))
        told.append(scalars.write(step).get("tables/told_scalars/bytes_exchanged"))
    if world.size == 1:
        assert told == [None] * 3
        return
    everyone = context.get_transport().all_gather(tf.constant([told], tf.float64), "told").numpy().sum(0)
    assert everyone.tolist() == [
        0,
        expected_bytes(world, [4], 8, [1], gradients=False),
        expected_bytes(world, [4], 8, [2, 2], gradients=False),
    ]
