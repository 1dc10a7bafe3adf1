"""A table with admission and eviction, and its twin of NumPy, kept in step: on any number of workers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.job import context
from tests.reference.judge import assert_close
from tests.reference.placement import columns
from tests.reference.policies import PolicyTable

DIM = 3
KEYS = np.array([0, 1, 2, 3, 5, 8, 13, 100, 2**40, -1, -7, -(2**63)])  # of which few batches hold the last ones
RATE = 0.1
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: sok.optimizers.SGD(RATE),
    "adam": lambda: sok.optimizers.Adam(RATE, epsilon=1e-7),  # exact: rows that no step touches move, too
}
_names = itertools.count()

Features = Sequence[np.ndarray]
"""Keys of one worker: [S, n] of a feature that is pooled, [n] of one that is not."""


@dataclasses.dataclass
class Both:
    """A table and its twin."""

    table: sok.EmbeddingVariable
    twin: PolicyTable
    rule: str
    in_function: bool = False
    traces: int = 0
    updates: int = 0  # of the optimizer

    @classmethod
    def make(
        cls,
        rule: str = "sgd",
        in_function: bool = False,
        name: str = "",
        admission: sok.Admission | None = None,
        eviction: sok.Eviction | None = None,
        **options: Any,
    ) -> Both:
        table = sok.EmbeddingVariable(
            DIM, 100, name=f"policies_{name}{next(_names)}", admission=admission, eviction=eviction, seed=5, **options
        )
        both = cls(table, twin_of(table), rule, in_function)
        both.optimizer = OPTIMIZERS[rule]()
        both._compiled = tf.function(both._step, reduce_retracing=True) if in_function else both._step
        return both

    def look_up(self, features: Sequence[tf.Tensor], training: bool = True) -> list[tf.Tensor]:
        """A group of all features; of more than one the last is looked up by a second call in the same step."""
        first = features[:-1] or features
        groups = [first, features[len(first) :]]
        found = []
        for group in filter(len, groups):
            flat = [f if f.shape.rank == 2 else f[:, tf.newaxis] for f in group]
            tables = [self.table] * len(group)
            found += sok.group_embedding_lookup_sparse(tables, flat, combiners="sum", training=training)
        return found

    def _step(self, features: Sequence[tf.Tensor], ticket: Any = None) -> list[tf.Tensor]:
        self.traces += 1
        with tf.GradientTape() as tape:
            with ticket or contextlib.nullcontext():
                found = self.look_up(features)
            loss = tf.add_n([tf.reduce_sum(tf.square(one - 1.0)) / 2 for one in found])
        gradient = tape.gradient(loss, self.table)
        self.optimizer.apply_gradients([(gradient, self.table)])
        return found

    def train(self, batches: Sequence[Features], ticket: Any = None) -> None:
        """One step: the features of each worker, as many of each."""
        mine = batches[sok.rank()]
        found = self._compiled(as_tensors(mine), ticket)
        expected: list[list[np.ndarray]] = [[] for _ in batches]
        gradients: dict[int, np.ndarray] = {}
        for feature in range(len(mine)):
            for worker, features in enumerate(batches):
                keys = features[feature]
                samples = keys if keys.ndim == 2 else keys[:, None]
                rows = self.twin.look_up(samples.ravel()).reshape(*samples.shape, DIM)
                expected[worker].append(rows.sum(1))
                for sample, pooled in zip(samples, rows.sum(1), strict=True):
                    for key in map(int, sample):
                        if key in self.twin.rows:
                            gradients[key] = gradients.get(key, np.zeros(DIM)) + (pooled - 1.0)
        for one, of_twin in zip(found, expected[sok.rank()], strict=True):
            assert_close(one.numpy(), of_twin, factor=20.0)  # of several steps
        self.updates += 1
        self.twin.update(self.rule, gradients, RATE, self.updates)

    def evaluate(self, keys: np.ndarray) -> None:
        """A lookup that counts nothing, and makes nothing."""
        (found,) = self.look_up([tf.constant(keys, tf.int64)], training=False)
        rows = self.twin.read(keys.ravel()).reshape(*keys.shape, DIM)
        assert_close(found.numpy(), rows.sum(1) if keys.ndim == 2 else rows, factor=20.0)

    def assign(self, keys: np.ndarray) -> None:
        values = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM) / 8
        self.table.assign(keys, values)
        self.twin.assign(keys, values)

    def erase(self, keys: np.ndarray) -> None:
        here = int(self.table.erase(keys))
        of_all = self.twin.erase(keys)
        if sok.size() == 1:
            assert here == of_all

    def save_and_restore(self, folder: Path, before: Callable[[], None]) -> None:
        """What happens in between is forgotten, but the counts of `stats`, which are of this table's life."""
        sok.save(folder, self.table, self.optimizer)
        kept, updates = copy.deepcopy(self.twin), self.updates
        before()
        sok.restore(folder, self.table, self.optimizer)
        self.twin.rows, self.twin.candidates, self.twin.step = kept.rows, kept.candidates, kept.step
        self.updates = updates

    def check(self, with_counts: bool = True) -> None:
        """Rows, keys, histories, candidates and counts of all workers are those of the twin."""
        check_rows(self.table, self.twin)
        check_histories(self.table, self.twin, KEYS if self.table.hashed else KEYS[(KEYS >= 0) & (KEYS < 100)])
        stats, expected = self.table.stats(), self.twin.stats()
        if not with_counts:
            stats, expected = ({k: of[k] for k in ("rows", "candidates")} for of in (stats, expected))
        elif sok.size() > 1:  # of the repeats of a refused key some do not travel
            assert stats.pop("refused") <= expected.pop("refused") or self.table.placement.cuts_rows
        assert {name: stats.get(name) for name in expected} == expected, (stats, expected)
        assert int(self.table.step) == self.twin.step


def counts_of(table: sok.EmbeddingVariable) -> dict[str, int]:
    """What is counted of any table: not of where its rows lie."""
    return {name: count for name, count in table.stats().items() if "gpu" not in name}


def as_tensors(features: Features) -> list[tf.Tensor]:
    """What a step takes."""
    return [tf.constant(keys, tf.int64) for keys in features]


def twin_of(table: sok.EmbeddingVariable) -> PolicyTable:
    """The empty twin of a table with the default initializer."""
    admission, eviction = table.options.admission, table.options.eviction
    return PolicyTable(
        table.dim,
        table.seed,
        after=admission and admission.after,
        probability=admission and admission.probability,
        older_than=eviction and eviction.older_than,
        norm_below=eviction and eviction.norm_below,
        every=eviction and eviction.every,
    )


def gathered(array: Any, what: str) -> np.ndarray:
    """Those of all workers, one after the other."""
    return context.get_transport().all_gather(tf.constant(np.asarray(array)), f"policies/{what}").numpy()


def contents(table: sok.EmbeddingVariable) -> dict[int, np.ndarray]:
    """The rows of all workers by their keys. Each worker must have what is its own of each key, and no more."""
    keys, rows = (tensor.numpy() for tensor in table.export())
    placement = _WORDS[type(table.placement).__name__, table.placement.hash]
    whole = np.full([len(keys), table.dim], np.nan, np.float32)
    for place, key in enumerate(keys):
        whole[place, columns(int(key), sok.size(), placement)[sok.rank()]] = rows[place]
    found: dict[int, list[np.ndarray]] = {}
    for key, row in zip(gathered(keys, "keys").tolist(), gathered(whole, "rows"), strict=True):
        found.setdefault(key, []).append(row)
    for key, parts in found.items():
        assert len(parts) == len(columns(key, sok.size(), placement))
        np.testing.assert_array_equal(np.nanmin(parts, 0), np.nanmax(parts, 0))  # copies are equal
    return {key: np.nanmin(parts, 0) for key, parts in found.items()}


# Words of tests/reference/placement.py.
_WORDS = {
    ("RowWise", False): "by key",
    ("RowWise", True): "by hash",
    ("ColumnWise", False): "columns",
    ("DataParallel", False): "copies",
}


def check_rows(table: sok.EmbeddingVariable, twin: PolicyTable) -> None:
    """All workers together have the twin's rows, and no others."""
    found = contents(table)
    assert found.keys() == twin.rows.keys()
    for key, row in found.items():
        assert_close(row, twin.rows[key].values, factor=20.0)  # of several steps


def check_histories(table: sok.EmbeddingVariable, twin: PolicyTable, keys: np.ndarray) -> None:
    """Whoever holds something of a key knows its history, and nobody else does."""
    counts, lasts = (np.asarray(tensor) for tensor in table.history(keys))
    assert counts.dtype == lasts.dtype == np.int64
    mine = table.placement.holds_keys(keys, table.rank, table.world_size)
    expected = np.array(twin.history(keys)) * mine
    np.testing.assert_array_equal(counts, expected[0])
    np.testing.assert_array_equal(lasts, expected[1])


def random_batches(rng: np.random.Generator, workers: int, keys: np.ndarray = KEYS, most: int = 4) -> list[Features]:
    """Of each worker a pooled feature, one of single keys, and one more that repeats some; some have no samples."""
    batches = []
    for _ in range(workers):
        samples = int(rng.integers(0, most + 1))
        pool = keys[: rng.integers(3, len(keys) + 1)]  # the first keys come often
        pooled, single = rng.choice(pool, [samples, 2]), rng.choice(pool, samples)
        batches.append([pooled, single, np.concatenate([single[:1], rng.choice(pool, 2)])])
    return batches
