"""Saves by version of tables of tf.compat.v1 sessions."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import prepare, read_manifest
from sok.table.counted import with_counted
from tests.sok.storage_cases import LITTLE, MEMORY

v1 = tf.compat.v1


class Trained:
    """A table over a file in a finalized graph, and the ops that train and show it."""

    def __init__(self, folder, **policies):
        self.graph = tf.Graph()
        with self.graph.as_default():
            storage = sok.Storage(memory_bytes=MEMORY, path=folder)
            self.table = sok.EmbeddingVariable(2, 9_000, name="in_session", seed=5, storage=storage, **policies)
            self.keys = v1.placeholder(tf.int64, [None])
            rows = tf.nn.embedding_lookup(self.table, self.keys)
            (gradient,) = tf.gradients(tf.reduce_sum(rows**2), [self.table])
            self.optimizer = sok.optimizers.Adagrad(0.1)
            self._step = self.optimizer.apply_gradients([(gradient, self.table)])
            tables = list(with_counted({"": self.table}).values())
            self._all = [table.export() for table in tables], self.table.step
            if policies:
                self._all = (*self._all, self.table.history(np.arange(900)))
            prepare(tables)
            self._init = v1.global_variables_initializer()
        self.graph.finalize()

    def session(self):
        session = v1.Session(graph=self.graph)
        session.run(self._init)
        return session

    def train(self, session, steps):
        for step in steps:
            keys = (np.random.default_rng(step).zipf(1.2, 200) + 40 * step) % 900
            session.run(self._step, {self.keys: keys})

    def holds(self, session):
        exports, *rest = session.run(self._all)
        ordered = [[part[np.argsort(keys)].tobytes() for part in (keys, rows)] for keys, rows in exports]
        return [ordered, tf.nest.map_structure(lambda array: array.tolist(), rest)]


@pytest.mark.parametrize(
    "policies",
    [{}, {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=3, every=1)}],
    ids=["plain", "with policies"],
)
def test_a_session_restores_what_versions_hold(tmp_path, monkeypatch, policies):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    it = Trained(tmp_path / "rows", **policies)
    how = {"versions": True, "session": None}
    with it.session() as session:
        how["session"] = session
        held = {}
        it.train(session, range(5))
        held["one"] = it.holds(session)
        sok.save(tmp_path / "one", it.table, it.optimizer, **how)
        it.train(session, range(5, 9))
        held["two"] = it.holds(session)
        saving = sok.save(tmp_path / "two", it.table, it.optimizer, asynchronous=True, **how)
        it.train(session, range(9, 12))  # beside it
        saving.result()
        for name in ("one", "two", "one"):
            sok.restore(tmp_path / name, it.table, it.optimizer, session=session)
            assert it.holds(session) == held[name]
        it.train(session, range(5, 9))
        assert it.holds(session) == held["two"]
        sok.save(tmp_path / "three", it.table, it.optimizer, **how)  # of a table that was restored
    with it.session() as session:
        for name in ("two", "three"):
            sok.restore(tmp_path / name, it.table, it.optimizer, session=session)
            assert it.holds(session) == held["two"]
        how["session"] = session
        it.train(session, range(9, 11))
        now = it.holds(session)
        sok.save(tmp_path / "one", it.table, it.optimizer, **how)
        it.train(session, range(11, 12))
        sok.restore(tmp_path / "one", it.table, it.optimizer, session=session)
        assert it.holds(session) == now


def hooked(folder, rows, most, **arguments):
    """The ops of a new graph that train a table over a file, and its hook."""
    keys = v1.placeholder(tf.int64, [None])
    count = v1.train.get_or_create_global_step()
    table = sok.EmbeddingVariable(
        2,
        9_000,
        name="hooked",
        seed=5,
        storage=sok.Storage(memory_bytes=MEMORY, path=rows),
        admission=sok.Admission(after=2),
    )
    (gradient,) = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(table, keys) ** 2), [table])
    step = sok.optimizers.Adagrad(0.1).apply_gradients([(gradient, table)])
    with tf.control_dependencies([step]):
        trained = v1.assign_add(count, 1)
    shown = [*table.export(), *table.history(np.arange(300)), count]
    saver = v1.train.Saver(max_to_keep=most)
    hook = sok.hooks.CheckpointSaverHook(folder, save_steps=3, saver=saver, mode="versions", **arguments)
    return keys, trained, shown, hook


def trained_and_shown(told, steps):
    """What there is after each step of a monitored session, which goes on from what it finds."""
    keys, trained, shown, hook = told
    held = {}
    with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        raw = session._tf_sess()  # whose runs are no steps

        def show():
            found, rows, *rest, count = raw.run(shown)
            order = np.argsort(found)
            return int(count), [part.tolist() for part in (found[order], rows[order], *rest)]

        held.update([show()])
        for _ in range(steps):
            step = max(held) + 1
            session.run(trained, {keys: np.random.default_rng(step).zipf(1.2, 100) % 300})
            held.update([show()])
    return held


def test_a_hook_lists_versions_that_later_sessions_go_on_from(tmp_path, monkeypatch):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "saves"
    with tf.Graph().as_default():
        held = trained_and_shown(hooked(folder, tmp_path / "rows", 2), 10)
    assert max(held) == 10
    state = tf.train.get_checkpoint_state(folder)
    assert [path.rpartition("-")[2] for path in state.all_model_checkpoint_paths] == ["9", "10"]
    assert {path.name.rpartition(".")[0] for path in folder.glob("*.index")} == {"model.ckpt-9", "model.ckpt-10"}
    assert len(list(folder.glob("*.meta"))) == len(list(folder.glob("*.sok"))) == 2
    (shard,) = (file for file in read_manifest(folder / "model.ckpt-10.sok").table("hooked").files)
    assert shard.rows > 50 and shard.bytes < 12 * shard.rows  # the rows are in their own file
    with tf.Graph().as_default():
        again = trained_and_shown(hooked(folder, tmp_path / "rows", 2), 1)
    assert again[10] == held[10] and max(again) == 11
    with tf.Graph().as_default(), pytest.raises(ValueError, match="`mode` must be one of 'files', 'versions'"):
        sok.hooks.CheckpointSaverHook(folder, 3, mode="marks")
