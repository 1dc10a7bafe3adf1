"""python -m benchmarks.storage --ahead: a training step whose rows were read ahead of it, beside one that reads them.

Four programs take turns with the same batches, window by window: a table in memory and one over a file, each of them
synchronously and by `sok.ahead(depth=...)`. A step looks up, computes what stands for the dense part of a model for
`--dense` ms (products of matrices, on all cores), waits for `--wait` ms, as for an accelerator that computes it, and
updates the rows. Printed are medians of the steps, the quotient of the file's two programs, and what a step has read
itself, by `table.stats()`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks.stores.tables import Table, over_a_file

_SIDE = 384  # of the matrices
HEADER = (
    "| dim | keys | distinct | computes, waits, ms | cache, rows | memory, ms | memory ahead, ms "
    "| file, ms | file ahead, ms | ahead / synchronous (quartiles) "
    "| rows that a step reads: synchronous, ahead | read ahead a step |"
)


@dataclasses.dataclass(frozen=True)
class Point:
    dim: int
    keys: int
    distinct: float
    dense_ms: float
    wait_ms: float
    cache_rows: int
    ms: dict[str, list[float]]  # of each program, the median of each window
    reads: dict[str, float]  # that a step has waited for
    read_ahead: float

    def line(self) -> str:
        times = [f"{np.median(self.ms[name]):.2f}" for name in ("memory", "memory ahead", "file", "file ahead")]
        low, middle, high = np.percentile(np.array(self.ms["file ahead"]) / self.ms["file"], [25, 50, 75])
        cells = [
            self.dim,
            self.keys,
            f"{self.distinct:.0f}",
            f"{self.dense_ms:g}, {self.wait_ms:g}",
            self.cache_rows,
            *times,
        ]
        cells += [f"{middle:.2f} ({low:.2f} to {high:.2f})"]
        cells += [f"{self.reads['file']:.0f}, {self.reads['file ahead']:.0f}", f"{self.read_ahead:.0f}"]
        return f"| {' | '.join(map(str, cells))} |"


def _products(x: tf.Tensor, count: int) -> tf.Tensor:
    for _ in range(count):
        x = tf.tanh(x @ x)
    return x


def products_in(ms: float) -> int:
    """How many products of matrices take so many ms here, alone."""
    some = tf.function(lambda x: _products(x, 20))
    x, taken = tf.fill([_SIDE, _SIDE], 1e-3), []
    for _ in range(15):
        begin = time.perf_counter()
        some(x)
        taken.append(1e3 * (time.perf_counter() - begin) / 20)
    return round(ms / np.median(taken))


def _after_ms(number: tf.Tensor, ms: float) -> tf.Tensor:
    def wait(number: tf.Tensor) -> tf.Tensor:
        time.sleep(1e-3 * ms)
        return number

    return tf.py_function(wait, [number], tf.float32) if ms else number


def _step_of(store: Table, products: int, wait_ms: float) -> Callable[..., None]:
    table, optimizer = store.table, store.optimizer

    @tf.function(reduce_retracing=True)
    def step(keys: tf.Tensor, ticket: Any) -> None:
        with tf.GradientTape() as tape:
            if ticket is None:
                (rows,) = look_up(table, keys)
            else:
                with ticket:
                    (rows,) = look_up(table, keys)
            total = tf.reduce_sum(rows)
            dense = _products(tf.fill([_SIDE, _SIDE], 1e-3) + tf.stop_gradient(total) * 1e-30, products)
            after = _after_ms(dense[0, 0], wait_ms)
            loss = total * tf.stop_gradient(1.0 + 1e-30 * after)  # so that the update comes then
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    return step


def look_up(table: sok.EmbeddingVariable, keys: tf.Tensor) -> list[tf.Tensor]:
    return sok.group_embedding_lookup([table], [keys])


def _program(store: Table, products: int, wait_ms: float, batches: Sequence[tf.Tensor], depth: int) -> Iterator[float]:
    """Makes a step for each batch; gives the ms that it took, with what it has waited for its batch."""
    step = _step_of(store, products, wait_ms)
    each: Any = ((keys, None) for keys in batches)
    if depth:
        each = iter(sok.ahead(batches, lambda keys: look_up(store.table, keys), depth=depth))
    while True:
        begin = time.perf_counter()
        found = next(each, None)
        if found is None:
            return
        step(*found)
        yield 1e3 * (time.perf_counter() - begin)


def _reads(store: Table) -> np.ndarray:
    stats = store.table.stats()
    return np.array([stats.get(name, 0) for name in ("misses", "read_ahead")])


def points(
    dims: Sequence[int],
    dense: Sequence[tuple[float, float]],  # ms of computing, and of waiting
    rows: int,
    share: float,
    folder: Path,
    batches_of: Callable[[int, int], list[tf.Tensor]],
    windows: int,
    steps: int,
    warm: int,
    depth: int,
) -> Iterator[Point]:
    """One for each dim and length of the dense part; `batches_of` gives so many, of a seed."""
    counts = itertools.count()
    for dim in dims:
        stores = {}
        for name in ("memory", "memory ahead"):
            stores[name] = Table(dim, rows, f"ahead{dim}_{next(counts)}")
        for name in ("file", "file ahead"):
            stores[name] = over_a_file(dim, rows, share, folder, f"ahead{dim}_{next(counts)}")[0]
        for seed, (dense_ms, wait_ms) in enumerate(dense):
            products = products_in(dense_ms) if dense_ms else 0
            batches = batches_of(warm + windows * steps + 1, seed)
            runs = {
                name: _program(store, products, wait_ms, batches, depth if name.endswith("ahead") else 0)
                for name, store in stores.items()
            }
            for run in runs.values():
                for _ in range(warm):
                    next(run)
            before = {name: _reads(store) for name, store in stores.items()}
            ms: dict[str, list[float]] = {name: [] for name in runs}
            for window in range(windows):
                for name in list(runs)[:: -1 if window % 2 else 1]:
                    # While others had their window, the pipeline has begun the first batch.
                    taken = [next(runs[name]) for _ in range(steps)][depth if steps > depth else 0 :]
                    ms[name].append(float(np.median(taken)))
            come = {name: (_reads(store) - before[name]) / (windows * steps) for name, store in stores.items()}
            distinct = float(np.mean([len(np.unique(keys)) for keys in batches[warm:]]))
            cache_rows = stores["file"].table.stats()["cache_rows"]
            reads = {name: float(one[0]) for name, one in come.items()}
            keys = len(batches[0])
            yield Point(dim, keys, distinct, dense_ms, wait_ms, cache_rows, ms, reads, float(come["file ahead"][1]))
            del runs
