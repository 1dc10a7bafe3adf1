"""The dense parts of the models, in TensorFlow: what is the same for every contestant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from benchmarks import synthetic
from benchmarks.workloads import W4_DENSE


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

    def __init__(self, model: synthetic.Model) -> None:
        self._mlp = Mlp([model.width, *model.mlp, 1], last_linear=True)
        self._stride = model.stride

    @property
    def variables(self) -> list[tf.Variable]:
        return self._mlp.variables

    def loss(self, embeddings: Sequence[tf.Tensor], dense: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        row = tf.concat(embeddings, 1)
        if self._stride > 1:
            row = tf.nn.avg_pool1d(row[:, :, None], self._stride, self._stride, "SAME")[:, :, 0]
        logits = self._mlp(tf.concat([row, dense], 1))
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
