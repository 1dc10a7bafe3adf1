"""Saves by version of tables of tf.compat.v1 sessions."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import prepare
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
