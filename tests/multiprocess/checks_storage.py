"""Tables over a file on several workers: what tables in memory are there, bit for bit."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import sok
from tests.placements import ALL_PLACEMENTS
from tests.sok.checkpoint_cases import contents
from tests.sok.storage_cases import FILL, LITTLE, MEMORY


def made(world, folder, dim, words, over_a_file, what=""):
    """A table of any world size with the same rows, and its optimizer."""
    placement = ALL_PLACEMENTS[words](world.size)
    storage = sok.Storage(memory_bytes=MEMORY, path=folder / f"rows{world.rank}")
    name = f"{what}{'over' if over_a_file else 'in'}_{words.replace(' ', '_')}"
    table = sok.EmbeddingVariable(
        dim, 2 * FILL, name=name, seed=3, placement=placement, storage=storage if over_a_file else None
    )
    return table, sok.optimizers.Adagrad(0.1)


def look_up(table, keys):
    return sok.group_embedding_lookup_sparse([table], [keys], combiners="sum")[0]


def step(table, optimizer, keys):
    with tf.GradientTape() as tape:
        pooled = look_up(table, keys)
        loss = tf.reduce_sum(tf.square(pooled - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return pooled.numpy()


def check_tables_over_files_are_those_in_memory(world, monkeypatch, tmp_path_of_rank):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    for words, dim in (("by key", 16), ("by hash", 16), ("columns", 3), ("copies", 16)):
        folder = tmp_path_of_rank.parent / f"storage_{words.replace(' ', '_')}_of_{world.size}"
        both = [made(world, folder, dim, words, over_a_file) for over_a_file in (False, True)]
        rng = np.random.default_rng(world.rank)
        for number in range(4):
            keys = rng.integers(0, FILL, [3 * FILL if number == 0 else 500, 4])
            keys = tf.constant(keys[:0] if number == 2 and world.rank else keys)
            first, second = (step(*one, keys) for one in both)
            np.testing.assert_array_equal(first, second)
        assert contents(both[0][0]) == contents(both[1][0])
        told, other = (table.stats() for table, _ in both)
        assert {name: other[name] for name in told} == told and other["misses"] > FILL / 4
        saved = folder / "saved"
        sok.save(saved, *both[1])
        fresh, optimizer = made(world, folder, dim, words, True)
        sok.restore(saved, {both[1][0].table_name: fresh}, optimizer)
        assert contents(fresh) == contents(both[0][0])


def check_owners_read_rows_ahead_of_the_step(world, monkeypatch, tmp_path_of_rank):
    monkeypatch.setenv("SOK_STORAGE_SEGMENT_BYTES", "8192")
    for words, dim, schedule in (("by key", 16, {}), ("by hash", 16, {"rows": True}), ("columns", 3, {"stale": 1})):
        frames = 700 if words == "columns" else 700 // world.size  # of each rank, which has all rows, or its part
        monkeypatch.setenv("SOK_STORAGE_FRAMES", str(frames))
        folder = tmp_path_of_rank.parent / f"storage_ahead_{words.replace(' ', '_')}_of_{world.size}"
        both = [made(world, folder, dim, words, over_a_file, "ahead_") for over_a_file in (False, True)]
        for one in both:
            for first in range(0, FILL, 500):  # all ranks ask for all, so that each has made its rows
                step(*one, tf.reshape(tf.range(first, first + 500, dtype=tf.int64), [-1, 4]))
        rng = np.random.default_rng(world.rank)
        batches = [tf.constant(rng.integers(0, FILL, [25, 4])) for _ in range(12)]
        (plain, plain_optimizer), (table, optimizer) = both
        before = table.stats()
        for number, (keys, ticket) in enumerate(
            sok.ahead(batches, lambda keys, table=table: look_up(table, keys), depth=1, **schedule)
        ):
            with ticket:
                found = step(table, optimizer, keys)
            if "stale" not in schedule:
                np.testing.assert_array_equal(found, step(plain, plain_optimizer, batches[number]))
        come = {name: count - before[name] for name, count in table.stats().items()}
        assert come["read_ahead"] > 300, come
        assert come["misses"] <= come["read_ahead"] / 20, come
        if "stale" not in schedule:
            assert contents(table) == contents(plain)


def check_a_manager_lists_versions_that_all_ranks_have(world, monkeypatch, tmp_path_of_rank):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path_of_rank.parent / f"versions_of_{world.size}"
    table, optimizer = made(world, folder, 4, "by hash", True)
    dense = tf.Variable([0.0])
    manager = sok.CheckpointManager(
        tf.train.Checkpoint(table=table, dense=dense), folder / "saves", max_to_keep=2, mode="versions"
    )
    rng, held = np.random.default_rng(world.rank), {}
    for number in range(4):
        step(table, optimizer, tf.constant(rng.integers(0, FILL, [300, 4])))
        dense.assign([float(number)])
        now = contents(table)
        held[manager.save()] = (number, now)
        step(table, optimizer, tf.constant(rng.integers(0, FILL, [300, 4])))  # beside it
    assert manager.restore_or_initialize() == list(held)[-1]  # which waits for it
    assert manager.checkpoints == list(held)[-2:]
    for path in manager.checkpoints:
        manager.restore(path)
        assert (int(dense.numpy()[0]), contents(table)) == held[path]
