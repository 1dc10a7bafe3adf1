"""Checkpoints by version: rows stay in the files of their tables, and each listed checkpoint is what it was."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint.manifest import read_manifest
from tests.sok.checkpoint_cases import contents
from tests.sok.storage_cases import LITTLE, MEMORY, RULES

ROWS = 1_500


@pytest.fixture(autouse=True)
def few_rows_in_memory(monkeypatch):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)


class Trained:
    """A table over a file, one in memory, a dense variable, and their manager."""

    def __init__(self, folder, rule="Adam", name="", **options):
        storage = sok.Storage(memory_bytes=MEMORY, path=folder / "rows")
        self.table = sok.EmbeddingVariable(4, 4 * ROWS, name=f"stored{name}", seed=3, storage=storage)
        self.other = sok.EmbeddingVariable(2, 100, name=f"beside{name}", seed=4)
        self.dense = tf.Variable([0.0, 0.0])
        self.optimizer = RULES[rule]()
        self.checkpoint = tf.train.Checkpoint(table=self.table, other=self.other, dense=self.dense)
        self.manager = sok.CheckpointManager(
            self.checkpoint, folder / "saves", **{"max_to_keep": 2, "mode": "versions", **options}
        )
        self._rng = np.random.default_rng(5)

    def train(self, steps):
        for _ in range(steps):
            ids = tf.constant(self._rng.zipf(1.2, 700) % ROWS)
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(self.table, ids)
                loss = tf.reduce_sum(rows**2) + tf.reduce_sum(tf.nn.embedding_lookup(self.other, ids % 50) ** 2)
            grads = tape.gradient(loss, [self.table, self.other])
            self.optimizer.apply_gradients(zip(grads, [self.table, self.other], strict=True))
            self.table.erase(ids[:3])
            self.dense.assign_add([1.0, 2.0])

    def holds(self):
        return contents(self.table), contents(self.other), self.dense.numpy().tolist()


@pytest.mark.parametrize("rule", ["Adam", "Adagrad"])
def test_every_listed_checkpoint_is_what_it_was(tmp_path, rule):
    it = Trained(tmp_path, rule)
    held = {}
    for _ in range(4):
        it.train(6)
        held_now = it.holds()
        held[it.manager.save()] = held_now
        it.train(3)
    it.manager.wait()
    assert it.manager.checkpoints == list(held)[-2:] and it.manager.latest_checkpoint == list(held)[-1]
    assert not [name for name in os.listdir(tmp_path / "saves") if name.startswith(("ckpt-1", "ckpt-2"))]
    (shard,) = (file for file in read_manifest(f"{it.manager.latest_checkpoint}.sok").table(it.table.table_name).files)
    assert shard.rows > ROWS / 2 and shard.bytes < shard.rows  # the rows are in their own file
    for path in it.manager.checkpoints:
        it.manager.restore(path)
        assert it.holds() == held[path]
        it.train(2)
    saved = it.manager.save()  # of the tables that were restored, which have files of their own
    held_now = it.holds()
    it.manager.wait()
    it.train(2)
    assert it.manager.restore_or_initialize() == saved
    assert it.holds() == held_now


def test_another_program_restores_it_into_any_tables(tmp_path):
    it = Trained(tmp_path)
    it.train(8)
    path = it.manager.save()
    it.manager.wait()
    held, name = contents(it.table), it.table.table_name
    in_memory = sok.EmbeddingVariable(4, 4 * ROWS, name="in_memory", seed=3)
    sok.restore(f"{path}.sok", {name: in_memory})
    assert contents(in_memory) == held
    sok.checkpoint.verify(f"{path}.sok")


def test_save_by_version_without_a_manager(tmp_path):
    it = Trained(tmp_path, "Adagrad")
    it.train(4)
    held = contents(it.table)
    sok.save(tmp_path / "one", it.table, versions=True)
    going_on = sok.save(tmp_path / "two", it.table, versions=True, asynchronous=True)
    it.train(4)
    going_on.result()
    for name in ("one", "two"):
        sok.restore(tmp_path / name, it.table)
        assert contents(it.table) == held


def test_a_log_stays_until_no_checkpoint_names_it(tmp_path):
    it = Trained(tmp_path)
    it.train(2)
    path = it.manager.save()
    it.manager.wait()
    logs = set((tmp_path / "rows").glob("*.rows"))
    it.manager.restore(path)  # rows move to another log
    assert logs < set((tmp_path / "rows").glob("*.rows"))
    for _ in range(2):
        it.train(1)
        it.manager.save()
    it.manager.wait()
    it.manager.save()
    it.manager.wait()
    assert not logs & set((tmp_path / "rows").glob("*.rows"))


def test_without_its_log_a_checkpoint_is_an_error_that_names_it(tmp_path):
    it = Trained(tmp_path)
    it.train(2)
    path = it.manager.save()
    it.manager.wait()
    (log,) = (tmp_path / "rows").glob("*.rows")
    before = it.holds()
    shutil.move(log, tmp_path / "elsewhere")
    with pytest.raises((tf.errors.NotFoundError, OSError), match=str(log)):
        sok.restore(f"{path}.sok", {it.table.table_name: it.table})
    assert it.holds()[0] == before[0]


def test_what_makes_no_sense_is_refused(tmp_path):
    it = Trained(tmp_path)
    for options, words in [
        ({"mode": "version"}, "`mode` must be one of 'files', 'versions'. Received: 'version'"),
        ({"keep_checkpoint_every_n_hours": 1.0}, "keeps checkpoints for ever"),
        ({"max_to_keep": 0}, "max_to_keep"),
    ]:
        with pytest.raises(ValueError, match=words):
            sok.CheckpointManager(it.checkpoint, tmp_path / "no", **{"max_to_keep": 2, "mode": "versions", **options})
    with pytest.raises(ValueError, match="`versions` and `incremental` exclude each other"):
        sok.save(tmp_path / "x", it.table, versions=True, incremental=True)
