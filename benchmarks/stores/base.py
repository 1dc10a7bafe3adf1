"""What a store of rows does in the benchmark, and what those that know records alone have in common."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops

RATE = 1e-3
START = 0.1  # of Adagrad's accumulators
EPSILON = 1e-7


class Unavailable(Exception):
    """A store that this machine cannot have; the text says what is missing."""


class Store(abc.ABC):
    """Rows [D] under keys, with an accumulator of Adagrad for each float."""

    @abc.abstractmethod
    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """The rows [N, D] of keys [N] int64, with repeats."""

    @abc.abstractmethod
    def train(self, keys: tf.Tensor) -> None:
        """A step of Adagrad, of a loss that is the sum of the rows of keys [N]."""

    @abc.abstractmethod
    def counts(self) -> dict[str, int]:
        """Since it was made: `hits` and `misses` in its cache, `reads` of the file (pieces), `bytes_written` to it."""

    def describe(self) -> str:
        """How it keeps rows, in words."""
        return ""


class RecordStore(Store):
    """A store that knows records [2 * D] of distinct keys, in ascending order: weights and accumulators."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    @abc.abstractmethod
    def read(self, keys: np.ndarray) -> np.ndarray:
        """The records [U, 2 * D] of keys [U], which ascend."""

    @abc.abstractmethod
    def write(self, keys: np.ndarray, records: np.ndarray) -> None:
        """Puts records [U, 2 * D] in the place of those that the keys [U] have."""

    def fill(self, rows: np.ndarray, first: int) -> None:
        """Makes the rows [n, D] of keys from `first` on."""
        records = np.concatenate([rows, np.full_like(rows, START)], 1)
        self.write(np.arange(first, first + len(rows)), records)

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        distinct, inverse = _distinct(keys)
        return tf.gather(self.read(distinct)[:, : self.dim], inverse)

    def train(self, keys: tf.Tensor) -> None:
        distinct, inverse = _distinct(keys)
        records = tf.constant(self.read(distinct))
        self.write(distinct, _updated(records, inverse).numpy())


def _distinct(keys: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
    found, inverse, _ = _ops.lib().sok_unique(keys, with_counts=False)
    order = tf.argsort(found)
    places = tf.scatter_nd(order[:, None], tf.range(tf.size(order)), [tf.size(order)])
    return tf.gather(found, order).numpy(), tf.gather(places, inverse)


@tf.function(reduce_retracing=True)
def _updated(records: tf.Tensor, inverse: tf.Tensor) -> tf.Tensor:
    """Looks up, differentiates the sum of all rows, and applies Adagrad."""
    weights, accumulators = tf.split(records, 2, axis=1)
    with tf.GradientTape() as tape:
        rows = tf.gather(weights, inverse)
        tape.watch(rows)
        loss = tf.reduce_sum(rows)
    gradients: Any = tape.gradient(loss, rows)
    summed = tf.math.unsorted_segment_sum(gradients, inverse, tf.shape(weights)[0])
    accumulators += tf.square(summed)
    return tf.concat([weights - RATE * summed / tf.sqrt(accumulators + EPSILON), accumulators], 1)
