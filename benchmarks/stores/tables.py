"""Tables of sok: in memory, and over a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks.stores.base import EPSILON, RATE, START, Store
from sok.base import _ops

_AT_ONCE = 1 << 18


class Table(Store):
    """A table that has the rows of keys 0 to `rows` - 1, made in this order, with Adagrad's accumulators."""

    def __init__(
        self,
        dim: int,
        rows: int,
        name: str,
        storage: sok.Storage | None = None,
        **policies: sok.Admission | sok.Eviction,
    ) -> None:
        self.table = sok.EmbeddingVariable(dim, rows, name=name, seed=1, storage=storage, **policies)
        self.optimizer = sok.optimizers.Adagrad(RATE, START, EPSILON)
        self._train = tf.function(self._step, input_signature=[tf.TensorSpec([None], tf.int64)])
        for first in range(0, rows, _AT_ONCE):
            _ops.lib().sok_table_lookup(self.table.handle, np.arange(first, min(rows, first + _AT_ONCE)), True, dim=dim)
        self._train(tf.zeros([0], tf.int64))  # makes the accumulators

    def _step(self, keys: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(self.table, keys))
        self.optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        return _ops.lib().sok_table_lookup(self.table.handle, keys, False, dim=self.table.dim)[0]

    def train(self, keys: tf.Tensor) -> None:
        self._train(keys)

    def counts(self) -> dict[str, int]:
        found = self.table.stats()
        return {
            "hits": found.get("hits", 0),
            "misses": found.get("misses", 0),
            "reads": found.get("misses", 0),
            "bytes_written": found.get("bytes_written", 0),
        }

    def rows(self, first: int, count: int) -> np.ndarray:
        """The initial rows of keys from `first` on."""
        return self.lookup(tf.range(first, first + count, dtype=tf.int64)).numpy()

    def describe(self) -> str:
        if self.table.options.storage is None:
            return "in memory: a table of sok"
        found = self.table.stats()
        return (
            f"file: a table of sok with {found['bytes_in_memory']:,} bytes of memory, of which a cache of "
            f"{found['cache_rows']:,} rows, and {found['bytes_in_file']:,} bytes of file"
        )


def over_a_file(dim: int, rows: int, share: float, folder: Path, name: str) -> tuple[Table, int]:
    """A table whose cache has room for about `share` of its rows, and the memory that it took."""
    return with_cache(lambda size, i: _over(dim, rows, size, folder, f"{name}_{i}"), rows, dim, share)


def _over(dim: int, rows: int, memory_bytes: int, folder: Path, name: str) -> Table:
    return Table(dim, rows, name, sok.Storage(memory_bytes=memory_bytes, path=folder))


def with_cache(make: Callable[[int, int], Any], rows: int, dim: int, share: float) -> tuple[Any, int]:
    """What `make(memory_bytes, attempt)` gives, with memory such that about `share` of the rows have room in it."""
    wanted, row_bytes = share * rows, 8 * dim + 24
    memory_bytes, made = int(22 * rows + wanted * row_bytes + 2**20), None
    for attempt in range(8):
        made = None  # its file goes
        try:
            made = make(memory_bytes, attempt)
        except (tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError):
            memory_bytes += 2**19
            continue
        has = made.table.stats()["cache_rows"]
        if abs(has - wanted) <= 0.05 * wanted or attempt == 7:
            return made, memory_bytes
        memory_bytes += int((wanted - has) * row_bytes)
    raise RuntimeError(f"no memory was enough for {wanted:,.0f} of {rows:,} rows")
