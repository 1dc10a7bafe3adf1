"""One cell while it runs: a kind of table, a rule, a folder, and all that operations have in common."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup.lookup import lookup_rows
from tests.matrix.kinds import DIM, Kind, Made
from tests.matrix.rules import RULES, Judge, Rule
from tests.reference.placement import columns


@dataclasses.dataclass
class Trained:
    """A table, what trains it, and NumPy's word on both."""

    made: Made
    optimizer: Any
    judge: Judge


@dataclasses.dataclass(frozen=True)
class Case:
    kind: Kind
    rule_name: str
    folder: Path  # the same on all workers, and empty
    name: str  # that of its tables begins with it

    @property
    def rule(self) -> Rule:
        return RULES[self.rule_name]

    @property
    def world(self) -> int:
        return sok.size()

    def make(self, name: str = "") -> Made:
        return self.kind.make(f"{self.name}{name}")

    def fresh(self, name: str = "") -> Trained:
        """A table that no step has touched. Its initial rows are taken at their word."""
        made, keys = self.make(name), self.kind.pool()
        initial = lookup_rows(made.table, tf.cast(keys, made.table.key_dtype), training=False).numpy()
        judge = self.judge(made, initial)
        judge.seen |= {int(key) for key in self.contents(made)[0]} & {int(key) for key in keys}
        return Trained(made, self.rule.make(), judge)

    def judge(self, made: Made, initial: np.ndarray) -> Judge:
        """NumPy's word on a table that no step has touched."""
        options = made.table.options
        return Judge(self.rule, self.kind.pool(), initial, made.erased, options.admission, options.eviction)

    def trained(self, steps: int = 3, name: str = "") -> Trained:
        it = self.fresh(name)
        self.train(it, steps)
        return it

    def batches(self, step: int) -> list[np.ndarray]:
        """Keys of each worker: some twice, none at all for the last of several in every third step."""
        rng, pool = np.random.default_rng(step), self.kind.pool()
        batches = [rng.choice(pool[: 6 + step % 3 * 3], 7) for _ in range(self.world)]
        if self.world > 1 and step % 3 == 2:
            batches[-1] = batches[-1][:0]
        return batches

    def train(self, it: Trained, steps: int, step: Callable[..., None] | None = None) -> None:
        for _ in range(steps):
            batches = self.batches(it.judge.steps)
            (step or self.step)(it, tf.constant(batches[sok.rank()]))
            it.judge.train(batches)

    @staticmethod
    def step(it: Trained, keys: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(it.made.rows(keys) - 1.0)) / 2
        it.optimizer.apply_gradients([(tape.gradient(loss, it.made.table), it.made.table)])

    def contents(self, made: Made) -> tuple[np.ndarray, np.ndarray]:
        """Keys and rows of all workers, sorted. Each worker must have what is its own of each key, and no more."""
        keys, rows = (tensor.numpy() for tensor in made.table.export())
        whole = np.full([len(keys), DIM], np.nan, np.float32)
        for place, key in enumerate(keys):
            whole[place, columns(int(key), self.world, self.kind.placement)[sok.rank()]] = rows[place]
        transport = context.get_transport()
        everyones_keys = transport.all_gather(tf.constant(keys.astype(np.int64)), "matrix/keys").numpy()
        everyones_rows = transport.all_gather(tf.constant(whole), "matrix/rows").numpy()
        everyones_keys = everyones_keys.astype(keys.dtype)
        distinct = np.unique(everyones_keys)
        found = [everyones_rows[everyones_keys == key] for key in distinct]
        for key, parts in zip(distinct, found, strict=True):
            assert len(parts) == self.num_holders(int(key))
            np.testing.assert_array_equal(np.nanmin(parts, 0), np.nanmax(parts, 0))  # copies are equal
        return distinct, np.array([np.nanmin(parts, 0) for parts in found], np.float32).reshape(-1, DIM)

    def num_holders(self, key: int) -> int:
        """How many workers have some of the row of a key."""
        return len(columns(key, self.world, self.kind.placement))

    def check(self, made: Made, judge: Judge, exactly: bool = True) -> None:
        """The table has the rows that the judge says."""
        keys, rows = self.contents(made)
        expected = np.sort(np.fromiter(judge.seen, self.kind.pool().dtype))
        keys = keys.astype(expected.dtype)
        if exactly and self.kind.hashed:
            np.testing.assert_array_equal(keys, expected)
        else:
            assert set(expected) <= set(keys)
            keep = np.isin(keys, expected)
            keys, rows = keys[keep], rows[keep]
        np.testing.assert_allclose(rows, judge.of(keys), rtol=1e-4, atol=2e-5)
        assert rows.shape == (len(keys), DIM)

    def go_on(self, made: Made, optimizer: Any, judge: Judge, steps: int = 2) -> None:
        """It trains as if nothing had happened."""
        self.check(made, judge)
        self.train(Trained(made, optimizer, judge), steps)
        self.check(made, judge)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Makes this worker a job of its own. What is done inside must leave names of later tables as on the others."""
        from sok.job.job import Job
        from sok.job.transport.local import LocalTransport

        before = context.get_job
        local = Job(LocalTransport())
        context.get_job = lambda: local
        try:
            yield
        finally:
            context.get_job = before
