"""Where the embedding rows of a model live: in a sharded sok table, or in a stock TensorFlow variable.

The stock twin exists to check the other: the same rows to start from, the same optimizer rule, one process.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from criteo.features import Features
from sok.job.context import get_transport

_RANGE = 0.05  # rows start uniformly distributed in [-0.05, 0.05]


def _stock_optimizer(name: str, learning_rate: Any, **more: float) -> tf.keras.optimizers.Optimizer:
    kinds = {"adam": "Adam", "lazyadam": "Adam", "adagrad": "Adagrad", "sgd": "SGD"}
    return getattr(tf.keras.optimizers, kinds[name])(learning_rate, **more)


class Sok:
    """Rows in sok tables, sharded over all workers."""

    def __init__(self, options: argparse.Namespace, num_features: int):
        self._options, self._num_features = options, num_features

    def embed(self, dim: int, name: str, zeros: bool = False) -> tf.keras.layers.Layer:
        """Return a layer from keys [B, F] to rows [B, F, dim], which start at zero or at small random values."""
        # A seed of its own, so that a table starts alike whatever it is called and in whichever backend.
        small = tf.keras.initializers.RandomUniform(-_RANGE, _RANGE, seed=2 * self._options.seed)
        return sok.DistributedEmbedding(
            combiner="sum",
            max_vocabulary_size_per_gpu=self._options.max_vocabulary_size_per_gpu,
            embedding_vec_size=dim,
            slot_num=self._num_features,
            max_nnz=1,
            embedding_initializer="zeros" if zeros else small,
            name=name,
        )

    def optimizer(self, kind: str, learning_rate: Any, **more: float) -> tf.keras.optimizers.Optimizer:
        """Return an optimizer that adds up all workers' gradients, of rows and of dense weights alike."""
        own = sok.optimizers.LazyAdam(learning_rate) if kind == "lazyadam" else None
        stock = _stock_optimizer(kind, learning_rate, **more)
        return sok.DistributedOptimizer(stock, embedding_optimizer=own, op=sok.Sum)

    def prepare(self, gradients: list) -> list:
        """Return the gradients as the optimizer wants them."""
        return gradients

    def rows_per_shard(self, model: tf.keras.Model) -> list[int]:
        """Return the rows in use on each worker. Collective."""
        mine = tf.reshape(tf.cast(model.embedding.embedding_variable.size(), tf.int64), [1])
        return get_transport().all_gather(mine, "criteo/rows").numpy().tolist()


class Stock:
    """All rows of the log's keys in one TensorFlow variable per table."""

    def __init__(self, options: argparse.Namespace, features: Features):
        if get_transport().size > 1:
            raise ValueError("`--backend stock` runs in one process: start it without horovodrun.")
        if options.optimizer == "lazyadam":
            raise ValueError("`--backend stock` has no lazyadam: give adam, adagrad or sgd.")
        self._options = options
        self._keys = distinct_keys(features)

    def embed(self, dim: int, name: str, zeros: bool = False) -> tf.keras.layers.Layer:
        """Return a layer from keys [B, F] to rows [B, F, dim], which start as those of `Sok`."""
        twin = Sok(self._options, num_features=1).embed(dim, name, zeros)
        rows = twin.embedding_variable.sparse_read(self._keys)  # initial values: nothing is in that table
        return DenseTable(self._keys, rows.numpy(), name=name)

    def optimizer(self, kind: str, learning_rate: Any, **more: float) -> tf.keras.optimizers.Optimizer:
        """Return TensorFlow's own optimizer."""
        return _stock_optimizer(kind, learning_rate, **more)

    def prepare(self, gradients: list) -> list:
        """Return the gradients as the optimizer wants them: dense.

        Adam of Keras 3.15 squares each duplicate of a sparse gradient by itself, in place of their sum, and so takes
        other steps than with the same gradient in dense form. tf_keras does not.
        """
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def rows_per_shard(self, model: tf.keras.Model) -> list[int]:
        """Return the number of rows, all on the only worker."""
        return [self._keys.size]


def distinct_keys(features: Features) -> np.ndarray:
    """Return all keys of a log, in ascending order [V] int64."""
    keys = np.empty(0, dtype=np.int64)
    for part in ("train", "test"):
        for batch in features.batches(part, 65536):
            keys = np.union1d(keys, batch.keys)
    return keys


class DenseTable(tf.keras.layers.Layer):
    """A row for each of the given keys in one ordinary variable."""

    def __init__(self, keys: np.ndarray, rows: np.ndarray, name: str):
        super().__init__(name=name)
        self._keys = tf.constant(keys)
        self.table = self.add_weight(shape=rows.shape, initializer="zeros", name="table")
        self.table.assign(rows)

    def call(self, keys, training=False):  # [B, F] -> [B, F, D]
        del training  # all keys have rows
        places = tf.searchsorted(self._keys, tf.reshape(keys, [-1]))
        return tf.gather(self.table, tf.reshape(places, tf.shape(keys)))
