"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class SGD(Optimizer):
    """Plain gradient descent: `w -= learning_rate * g` for the rows of the batch. No slots.

    Arguments other than the rate's default are those of `sok.optimizers.Optimizer`.

    Example:
        >>> import tensorflow as tf, sok
        >>> from sok.lookup.lookup import lookup_rows
        >>> table = sok.EmbeddingVariable(dim=2, capacity=8, initializer="ones", name="sgd_example")
        >>> optimizer = sok.optimizers.SGD(learning_rate=0.5)
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(lookup_rows(table, tf.constant([7, 7], tf.int64)))
        >>> optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        >>> table.sparse_read([7]).numpy().tolist()
        [[0.0, 0.0]]
    """

    rule = "sgd"

    def __init__(self, learning_rate: Rate = 0.01, name: str | None = None, **options: Any) -> None:
        super().__init__(learning_rate, name, **options)
