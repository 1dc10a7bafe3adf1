"""Tables on the emulated GPU with rows of several workers, which their hosts have all of. Run by test_workers.py."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.job.job import Job
from sok.job.transport.local import LocalTransport
from tests.multiprocess import checks_policies as policies
from tests.placements import ALL_PLACEMENTS

from .conftest import GPU
from .tier_cases import CPU, DIM, FILL, assert_close, new_table


def check_workers_are_one_job(world):
    sok.Init(global_batch_size=8)
    assert sok.size() == world.size


def on_the_gpu(check):
    """The same check with its tables there."""

    @functools.wraps(check)
    def there(*arguments):
        with tf.device(GPU):
            assert sok.EmbeddingVariable(2, 10, admission=sok.Admission(after=2)).handle.device.endswith("GPU:0")
            return check(*arguments)

    assert inspect.signature(there) == inspect.signature(check)
    return there


check_policies = on_the_gpu(policies.check_policies_do_what_they_do_on_one_worker)
check_policies_ahead = on_the_gpu(policies.check_policies_count_in_the_step_whose_keys_went_ahead)
check_policies_of_many_and_one = on_the_gpu(policies.check_policies_of_many_go_on_with_one)
check_histories = on_the_gpu(policies.check_histories_are_asked_for_where_they_lie)
check_full_tables = on_the_gpu(policies.check_full_tables_give_up_what_they_give_up_on_one_worker)


def both_of(world, words, folder=None, name="tier"):
    """A table on the CPU and one on the GPU, with the same rows."""
    placement = ALL_PLACEMENTS[words](world.size)
    tables = [
        new_table(device, folder, name=f"{name}_{device[1:4]}_{words.replace(' ', '_')}", placement=placement)
        for device in (CPU, GPU)
    ]
    values = np.random.default_rng(1).normal(size=[FILL, DIM]).astype(np.float32)
    for table in tables:
        table.assign(np.arange(FILL), values)
    return tables, [sok.optimizers.Adam(0.01) for _ in tables]


def look_up(table, keys, training=True):
    ragged = tf.RaggedTensor.from_row_lengths(keys, [len(keys) // 3, len(keys) - len(keys) // 3])
    weights = ragged.with_values(tf.linspace(0.5, 2.0, len(keys)) if len(keys) else tf.zeros([0]))
    return sok.group_embedding_lookup_sparse(
        [table, table], [ragged, keys[:, None]], ["mean", "sum"], sp_weights=[weights, None], training=training
    )


def train(table, optimizer, keys):
    with tf.device(table.handle.device):
        with tf.GradientTape() as tape:
            found = look_up(table, keys)
            loss = tf.add_n([tf.reduce_sum(tf.square(one - 1.0)) for one in found])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return found


def assert_same(tables, slot_sets=()):
    for (keys, *rest), (expected, *others) in zip(*([t.export(), *map(t.slots, s)] for t, s in tables), strict=True):
        order, other = np.argsort(keys.numpy()), np.argsort(expected.numpy())
        np.testing.assert_array_equal(keys.numpy()[order], expected.numpy()[other])
        for one, two in zip(rest, others, strict=True):
            assert_close(one.numpy()[order], two.numpy()[other])


def batches_of(world, count, seed=0):
    """Of this worker: few of each, other ones each time, and none in every third of the last worker's."""
    rng = np.random.default_rng([seed, world.rank])
    found = [tf.constant((rng.integers(0, 200, 60) + 90 * step) % (FILL + 30)) for step in range(count)]
    return [keys[:0] if step % 3 == 2 and world.rank == world.size - 1 else keys for step, keys in enumerate(found)]


def check_rows_in_use_on_a_gpu_train_as_on_the_cpu(world, tmp_path_of_rank):
    for words in ("by hash", "columns", "copies"):
        folder = tmp_path_of_rank if words == "by hash" else None
        tables, optimizers = both_of(world, words, folder)
        sets = [[optimizer.slot_set] for optimizer in optimizers]
        for step, keys in enumerate(batches_of(world, 6)):
            expected, found = (train(*one, keys) for one in zip(tables, optimizers, strict=True))
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other)
            for table in tables:
                with tf.device(table.handle.device):
                    look_up(table, tf.range(100 * step, 100 * step + 90, dtype=tf.int64), training=False)
                if step == 3:
                    table.erase(np.arange(0, FILL, 7))
        assert_same(list(zip(tables, sets, strict=True)))
        stats = tables[1].stats()
        assert stats["gpu_misses"] > FILL / 2 and stats["gpu_rows"] > 0
        saved = tmp_path_of_rank.parent / f"tiers_{words.replace(' ', '_')}"
        sok.save(saved, [tables[1]], [optimizers[1]])
        fresh, others = both_of(world, words, folder, "restored")
        for table, optimizer in zip(fresh, others, strict=True):
            sok.restore(saved, {tables[1].table_name: table}, [optimizer])
            assert_same([(table, []), (tables[1], [])])
        assert_same([(table, [one.slot_set]) for table, one in zip(fresh, others, strict=True)])


def check_keys_ahead_of_rows_in_use_on_a_gpu(world):
    tables, optimizers = both_of(world, "by hash", name="ahead")
    batches = batches_of(world, 9, seed=3)

    def pooled(table, keys):
        return sok.group_embedding_lookup_sparse([table, table], [keys[:, None], keys[1:, None]], "sum")

    for table, optimizer in zip(tables, optimizers, strict=True):

        @tf.function(reduce_retracing=True)
        def step(keys, ticket, table=table, optimizer=optimizer):
            with tf.GradientTape() as tape:
                with ticket:
                    found = pooled(table, keys)
                loss = tf.add_n([tf.reduce_sum(tf.square(one - 1.0)) for one in found])
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        with tf.device(table.handle.device):
            for keys, ticket in sok.ahead(batches, lambda keys, table=table: pooled(table, keys), depth=2):
                step(keys, ticket)
    assert_same([(table, [one.slot_set]) for table, one in zip(tables, optimizers, strict=True)])
    assert int(tables[1].step) == len(batches)


def check_rows_of_many_workers_go_on_with_one(world, tmp_path_of_rank, monkeypatch):
    (_, table), (_, optimizer) = both_of(world, "by key", name="of_many")
    for keys in batches_of(world, 4):
        train(table, optimizer, keys)
    folder = tmp_path_of_rank.parent / "tiers_of_many"
    sok.save(folder, [table], [optimizer])
    with monkeypatch.context() as patch:  # every worker alone
        alone = Job(LocalTransport())
        patch.setattr(context, "get_job", lambda: alone)
        tables = [new_table(device, gpu_bytes=60_000) for device in (CPU, GPU)]
        optimizers = [sok.optimizers.Adam(0.01) for _ in tables]
        for one, fresh in zip(tables, optimizers, strict=True):
            sok.restore(folder, {table.table_name: one}, [fresh])
            for keys in batches_of(world, 2, seed=5):
                train(one, fresh, keys)
            one.sparse_read(np.arange(FILL))
        assert_same([(one, [fresh.slot_set]) for one, fresh in zip(tables, optimizers, strict=True)])


def check_what_one_owner_has_no_room_for_is_raised_on_all(world):
    (_, table), (_, optimizer) = both_of(world, "by hash", name="crowded")
    train(table, optimizer, tf.range(50, dtype=tf.int64))
    many = tf.range(FILL, dtype=tf.int64) if world.rank == 0 else tf.constant([1, 2], tf.int64)
    for _ in range(2):
        with tf.device(GPU), pytest.raises(tf.errors.ResourceExhaustedError, match="rows of a lookup have to come"):
            look_up(table, many)
    train(table, optimizer, tf.range(100, 300, dtype=tf.int64))
