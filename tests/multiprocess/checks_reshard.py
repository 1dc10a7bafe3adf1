"""`sok.reshard` on real workers: as a save that is restored into tables of the other placement, byte for byte."""

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import native
from sok.job import context
from sok.table import resharding
from tests.multiprocess.harness import World

DIM, CAPACITY = 4, 600
_OF_ALL = {
    "by key": lambda size: sok.row_wise(),
    "one worker": lambda size: sok.table_wise(size - 1),
    "by hash": lambda size: sok.row_wise(hash=True),
    "columns": lambda size: sok.column_wise([1, 3], owners=[size - 1, 0]),
    "copies": lambda size: sok.data_parallel(),
    "a host": lambda size: sok.table_row_wise(1, hosts=2, hash=True),
}
_RULES = {"Adam": lambda: sok.optimizers.Adam(0.1), "RowWiseAdagrad": lambda: sok.optimizers.RowWiseAdagrad(0.1)}


def make_table(name, placement, **more):
    return sok.EmbeddingVariable(DIM, CAPACITY, name=name, placement=placement, seed=5, **more)


def train(world: World, tables, optimizer, first, steps=3):
    for step in range(first, first + steps):
        keys = np.random.default_rng([step, world.rank]).integers(0, 400, 40)
        tables = tables if isinstance(tables, list) else [tables]
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(tf.nn.embedding_lookup(t, tf.constant(keys, tf.int64)) ** 2) for t in tables)
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))


def contents(table, *names):
    """Keys of this worker, with all that they have here: by key, as bytes."""
    keys, rows = (tensor.numpy() for tensor in table.export())
    order = np.argsort(keys)
    # A restored shard without rows has no slots.
    slots = [table.slots(name)[1].numpy()[order].tobytes() if len(keys) else b"" for name in names]
    if table.options.keeps_history:
        counts, last = table.history(np.arange(400))
        slots += [counts.numpy().tobytes(), last.numpy().tobytes()]
    return [keys[order].tobytes(), rows[order].tobytes(), *slots, int(table.step)]


def check_reshard_is_as_save_and_restore(world: World, tmp_path_of_rank: Path, monkeypatch) -> None:
    monkeypatch.setattr(resharding, "PIECE_BYTES", 1 << 9)  # several pieces, of which some workers have fewer
    policies = {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=4, every=2)}
    for number, (rule, more) in enumerate([("Adam", {}), ("RowWiseAdagrad", {}), ("Adam", policies)]):
        table, optimizer = make_table(f"moved{number}", sok.row_wise(hash=True), **more), _RULES[rule]()
        train(world, table, optimizer, 0)
        for place, (name, make) in enumerate(_OF_ALL.items()):
            placement = make(world.size)
            if placement.cuts_rows and (rule != "Adam" or more):
                continue
            train(world, table, optimizer, 10 * place, steps=2)
            folder = tmp_path_of_rank.parent / f"as_saved_{world.size}_{number}_{place}"
            sok.save(folder, table, optimizer)
            other = make_table(f"restored{number}_{place}", placement, **more)
            sok.restore(folder, {table.table_name: other}, optimizer)
            before = sum(table.stats().values()) if more else 0
            table.reshard(placement)
            assert contents(table, optimizer.slot_set) == contents(other, optimizer.slot_set), name
            assert (sum(table.stats().values()) if more else 0) == before
            assert table.placement == placement and table.rank == world.rank
            train(world, [table, other], optimizer, 10 * place + 5, steps=1)
            assert contents(table, optimizer.slot_set) == contents(other, optimizer.slot_set), name


def check_reshard_brings_what_has_changed_since_a_save(world: World, tmp_path_of_rank: Path) -> None:
    folder = tmp_path_of_rank.parent / f"changes_{world.size}"
    table, optimizer = make_table("changes", sok.row_wise()), sok.optimizers.Adam(0.1)
    train(world, table, optimizer, 0, steps=6)
    sok.save(folder, table, optimizer)
    train(world, table, optimizer, 100, steps=1)
    table.erase(np.arange(5))
    table.reshard(sok.row_wise(hash=True))
    train(world, table, optimizer, 101, steps=1)
    sok.save(folder, table, optimizer, incremental=True)
    rows = [sum(f.rows for f in link.table("changes").files) for link in sok.checkpoint.read_manifest(folder).links]
    assert len(rows) == 2 and 0 < rows[1] <= 80 * world.size < rows[0]
    other = make_table("changes_again", sok.row_wise(hash=True))
    sok.restore(folder, {"changes": other}, optimizer)
    assert contents(table)[0] == contents(other)[0]
    np.testing.assert_allclose(*(np.sort(t.export()[1].numpy(), 0) for t in (table, other)), rtol=1e-4, atol=1e-6)


def check_reshard_of_row_numbers(world: World) -> None:
    table = make_table("numbers", sok.row_wise(), hashed=False, num_keys=CAPACITY * world.size - 1)
    keys = np.arange(0, CAPACITY * world.size - 1, 7)
    rows = np.random.default_rng(3).normal(size=(len(keys), DIM)).astype(np.float32)
    table.assign(keys, rows)
    for placement in (sok.table_wise(world.size - 1), sok.data_parallel(), sok.row_wise()):
        table.reshard(placement)
        assert table.num_keys == CAPACITY * world.size - 1
        np.testing.assert_array_equal(table.sparse_read(keys), rows)
    assert table.capacity == CAPACITY
    with pytest.raises(ValueError, match="hashed=True"):
        table.reshard(sok.row_wise(hash=True))
    with pytest.raises(ValueError, match="`capacity` is for hashed tables.*numbers"):
        table.reshard(sok.table_wise(0), capacity=10)
    np.testing.assert_array_equal(table.sparse_read(keys), rows)


def check_reshard_refuses_and_changes_nothing(
    world: World, tmp_path_of_rank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, optimizer = make_table("refuses", sok.row_wise()), sok.optimizers.RowWiseAdagrad(0.1)
    train(world, table, optimizer, 0)
    before = contents(table, optimizer.slot_set)
    counts = make_table("counts", sok.row_wise(), admission=sok.Admission(after=2))
    rank = world.rank

    def refused(kind, words, call):
        with pytest.raises(kind, match=words):
            call()
        assert contents(table, optimizer.slot_set) == before and table.placement == sok.row_wise()

    refused(ValueError, "must be a placement.*'row_wise'", lambda: table.reshard("row_wise"))
    refused(ValueError, "rank in", lambda: table.reshard(sok.table_wise(world.size)))
    refused(ValueError, "trained by 'rowwise_adagrad'.*cuts rows", lambda: table.reshard(sok.column_wise(2)))
    refused(ValueError, "counts whole rows", lambda: counts.reshard(sok.column_wise(2)))
    refused(ValueError, "one table twice", lambda: sok.reshard([table, table], sok.row_wise()))
    refused(ValueError, "no embedding table", lambda: sok.reshard([], sok.row_wise()))
    refused(TypeError, "`tables`.*Received: 3", lambda: sok.reshard(3, sok.row_wise()))
    refused(ValueError, "capacity", lambda: table.reshard(sok.table_wise(0), capacity=0))
    full = tf.errors.ResourceExhaustedError
    refused(full, "refuses.*10", lambda: table.reshard(sok.table_wise(0), capacity=10))
    if world.size > 1:
        refused(ValueError, "must be the same on all workers", lambda: table.reshard(sok.row_wise(hash=rank == 0)))
        refused(ValueError, "rank 1 of", lambda: table.reshard(sok.row_wise() if rank != 1 else None))
    goes_on, save_snapshot = threading.Event(), native.EagerCalls.save_snapshot

    def waiting(self, *arguments):
        assert goes_on.wait(60)
        return save_snapshot(self, *arguments)

    monkeypatch.setattr(native.EagerCalls, "save_snapshot", waiting)
    saving = sok.save(tmp_path_of_rank.parent / f"under_way_{world.size}", table, optimizer, asynchronous=True)
    refused(
        tf.errors.FailedPreconditionError, "asynchronous save is under way", lambda: table.reshard(sok.table_wise(0))
    )
    goes_on.set()
    saving.result()
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="outside of tf.function"):
        table.reshard(sok.row_wise())
    table.reshard(sok.table_wise(0), capacity=10 * CAPACITY)
    assert table.capacity == 10 * CAPACITY and int(table.total_size()) == len(before[0]) // 8 or world.size > 1


def check_reshard_refuses_functions_from_before(world: World) -> None:
    table, optimizer = make_table("traced", sok.row_wise()), sok.optimizers.SGD(0.1)

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return loss

    before, keys = tf.function(step), tf.constant([1, 2, 3 + world.rank], tf.int64)
    before(keys)
    with tf.GradientTape() as tape:
        rows = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
    late = tape.gradient(rows, table)
    for placement in (sok.data_parallel(), sok.row_wise(hash=True)):
        table.reshard(placement)
        kept = hashlib.sha256(b"".join(contents(table)[:2])).digest()
        for _ in range(2):
            with pytest.raises(tf.errors.OpError, match="'traced'.*has another placement now"):
                before(keys)
        optimizer.apply_gradients([(late, table)])  # of rows that are gone from where it says
        assert hashlib.sha256(b"".join(contents(table)[:2])).digest() == kept
    context.get_transport().barrier("reshard/traced")
    assert float(tf.function(step)(keys)) >= 0
