"""What the TensorFlow contestants (ours, stock, TFRA) share: threads, inputs as tensors, the dense part of models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf

from benchmarks.workloads import W4_DENSE, Bags

LEARNING_RATE = 0.01


def set_threads(threads: int) -> None:
    """Before anything else runs."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def flat(bags: Bags, keys: Any = None) -> list[tf.Tensor]:
    """values and row_splits of each table in turn, as a function takes them. keys(ids, t): what stands for the ids."""
    tensors = []
    for t in range(bags.num_tables):
        ids, splits = bags.table(t)
        tensors += [tf.constant(ids if keys is None else keys(ids, t)), tf.constant(splits)]
    return tensors


def flat_signature(tables: int, batch: int) -> list[tf.TensorSpec]:
    """What fits `flat` of any batch."""
    return [tf.TensorSpec([None], tf.int64), tf.TensorSpec([batch + 1], tf.int64)] * tables


def as_ragged(tensors: Sequence[tf.Tensor]) -> list[tf.RaggedTensor]:
    """One RaggedTensor [B, None] per table from what `flat` gave. Made inside the function: it costs nothing there."""
    return [
        tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        for values, splits in zip(tensors[0::2], tensors[1::2], strict=True)
    ]


def in_one_call(step: Any, batches: Sequence[Sequence[tf.Tensor]]) -> Any:
    """A function that runs `step` on each of the batches in turn: Keras' steps_per_execution.

    A call of a function with 52 tensors costs a millisecond in Python, before any TensorFlow op runs.
    """

    @tf.function
    def run() -> list[Any]:
        return [step(*flat) for flat in batches]

    return run


def gradients_for(shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """What comes back to the lookups of W2 from a model that is not there."""
    return [tf.random.stateless_normal(shape, [5, i], stddev=1e-3) for i, shape in enumerate(shapes)]


class Mlp:
    """Dense layers with relu; the last is linear if asked for. Plain variables, no framework in between."""

    def __init__(self, widths: Sequence[int], last_linear: bool = False) -> None:
        self.weights, self.biases = [], []
        for i, (inputs, outputs) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            stddev = (2.0 / (inputs + outputs)) ** 0.5
            self.weights.append(tf.Variable(tf.random.stateless_normal([inputs, outputs], [i, 9], stddev=stddev)))
            self.biases.append(tf.Variable(tf.zeros([outputs])))
        self._last_linear = last_linear

    @property
    def variables(self) -> list[tf.Variable]:
        return self.weights + self.biases

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        last = len(self.weights) - 1
        for i, (weights, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weights + bias
            if i < last or not self._last_linear:
                x = tf.nn.relu(x)
        return x


class Dlrm:
    """The dense part of W4: 13 numbers through an MLP, all pairs of products with the embeddings, an MLP on top."""

    def __init__(self, tables: int, dim: int) -> None:
        vectors = tables + 1
        pairs = vectors * (vectors - 1) // 2
        self._bottom = Mlp([W4_DENSE, 64, dim])
        self._top = Mlp([dim + pairs, 64, 1], last_linear=True)
        lower = np.tril_indices(vectors, -1)
        self._pairs = tf.constant((lower[0] * vectors + lower[1]).astype(np.int32))
        self._vectors = vectors

    @property
    def variables(self) -> list[tf.Variable]:
        return self._bottom.variables + self._top.variables

    def loss(self, embeddings: Sequence[tf.Tensor] | tf.Tensor, dense: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Embeddings: [B, D] of each table, or [B, T, D]."""
        hidden = self._bottom(dense)
        if isinstance(embeddings, tf.Tensor):
            stacked = tf.concat([hidden[:, None], embeddings], 1)
        else:
            stacked = tf.stack([hidden, *embeddings], 1)
        products = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), [-1, self._vectors**2])
        logits = self._top(tf.concat([hidden, tf.gather(products, self._pairs, axis=1)], 1))
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


class Tower:
    """The dense part of the synthetic models: all embeddings and numbers in one row, through an MLP."""

    def __init__(self, width: int, mlp: Sequence[int]) -> None:
        self._mlp = Mlp([width, *mlp, 1], last_linear=True)

    @property
    def variables(self) -> list[tf.Variable]:
        return self._mlp.variables

    def loss(self, embeddings: Sequence[tf.Tensor], dense: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        logits = self._mlp(tf.concat([*embeddings, dense], 1))
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def stock_optimizer(name: str, learning_rate: float = LEARNING_RATE) -> Any:
    """Stock optimizer for dense variables and for stock tables: tf_keras' legacy ones, the fastest on IndexedSlices."""
    from tf_keras.optimizers import legacy

    makers = {"sgd": legacy.SGD, "adagrad": legacy.Adagrad, "adam": legacy.Adam, "lazyadam": legacy.Adam}
    return makers[name](learning_rate)
