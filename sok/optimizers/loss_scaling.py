"""Whether a step takes place under a loss scale, asked of tables too, and of all workers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok.base import keras_calls
from sok.job import context
from sok.job.transport.ordering import after_answers


def follow_loss_scaler() -> None:
    """Lets the `LossScaleOptimizer` of Keras 3 that has called us, if one has, decide by `all_finite` from now on.

    What it has of its own would make matrices of the gradients of tables, as high as the table, and would look at this
    worker's gradients alone: workers that decide differently wait for each other for ever.
    """
    scaler = keras_calls.loss_scaler()
    if scaler is not None:
        scaler.check_finite = all_finite


def all_finite(grads: Sequence[Any]) -> tf.Tensor:
    """Whether no gradient has a NaN or an infinity on any worker: bool [].

    Args:
        grads: tensors, `tf.IndexedSlices` or None.

    Collective if there are several workers: 4 bytes.
    """
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    is_finite = [tf.reduce_all(tf.math.is_finite(v)) for v in values]
    here = tf.reduce_all(tf.stack(is_finite)) if is_finite else tf.constant(True)
    transport = context.get_transport()
    if transport.size == 1:
        return here
    name = context.unique_collective_name("sok/finite_gradients")
    with after_answers():
        is_bad = tf.cast(~here, tf.float32)
    (bad_workers,) = transport.grouped_all_reduce([is_bad], name, average=False)
    return tf.equal(bad_workers, 0.0)
