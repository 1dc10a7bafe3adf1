"""Tables beside equivalent dense matrices, and steps that reach both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from tests.reference import optimizers as reference

ROWS, DIM = 12, 3


@dataclasses.dataclass
class Step:
    keys: np.ndarray  # [N] int64, duplicates allowed
    grads: np.ndarray  # [N, DIM] float32, one per key

    def dense(self, rows: int = ROWS) -> np.ndarray:
        """The gradient of the equivalent dense table, whose row k is that of key k."""
        return reference.dense_gradient(self.keys, self.grads, rows).astype(np.float32)


def random_steps(rng: np.random.Generator, count: int, rows: int = ROWS, most: int = 6) -> Iterator[Step]:
    """Steps on skewed keys; some have no keys at all, some the same key twice."""
    weights = 1.0 / np.arange(1, rows + 1) ** 1.5
    for _ in range(count):
        keys = rng.choice(rows, rng.integers(0, most + 1), p=weights / weights.sum()).astype(np.int64)
        yield Step(keys, rng.normal(size=(len(keys), DIM)).astype(np.float32))


def initial_rows(rng: np.random.Generator, rows: int = ROWS) -> np.ndarray:
    return rng.normal(size=(rows, DIM)).astype(np.float32)


def table_of(values: np.ndarray, name: str = "table") -> sok.EmbeddingVariable:
    """An eager table in which key k has row values[k]."""
    table = empty_table(len(values), name)
    table.assign(np.arange(len(values)), values)
    return table


def empty_table(rows: int = ROWS, name: str = "table") -> sok.EmbeddingVariable:
    return sok.EmbeddingVariable(DIM, 4 * rows, name=name)


def gradient(table: sok.EmbeddingVariable, keys: Any, grads: Any) -> tf.IndexedSlices:
    """What a tape gives for a loss whose derivative by the row of keys[i] is grads[i]."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup_rows(table, tf.convert_to_tensor(keys, tf.int64)) * grads)
    return tape.gradient(loss, table)


def stepper(optimizer: Any, table: sok.EmbeddingVariable) -> Any:
    """A compiled step(keys, grads)."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)])
    def step(keys: tf.Tensor, grads: tf.Tensor) -> None:
        optimizer.apply_gradients([(gradient(table, keys, grads), table)])

    return step


def rows_of(table: sok.EmbeddingVariable, rows: int = ROWS) -> np.ndarray:
    return table.sparse_read(np.arange(rows)).numpy()
