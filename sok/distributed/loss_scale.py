"""Loss scaling: whether a step takes place, asked of tables too, and of all workers together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import keras_calls
from sok.distributed.reduction import Pair, reduce_dense, split_pairs, table_scale
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


def aggregate(grads_and_vars: Iterable[Pair], op: str) -> list[Pair]:
    """What a tf_keras `LossScaleOptimizer` asks for before it looks whether gradients are finite: those of all workers.

    Its own look then finds the same everywhere: sums of dense gradients hold the NaN of any worker, and a NaN in rows,
    which stay with their owners, is told to all.

    Args:
        grads_and_vars: pairs whose gradients are not None.
        op: 'average' or 'sum'.

    Returns:
        The pairs in order, reduced; to be applied without reducing them again.

    Collective if there are several workers: the dense gradients, and 4 bytes if there are tables.
    """
    pairs = list(grads_and_vars)
    if context.size() == 1 or not pairs:
        return pairs
    of_tables, others = split_pairs(pairs)
    reduced = {id(v): grad for grad, (_, v) in zip(reduce_dense(others, op, of_tables), others, strict=True)}
    scale = table_scale(op)
    rows = {id(v): tf.IndexedSlices(grad.values * scale, grad.indices, grad.dense_shape) for grad, v in of_tables}
    if of_tables:
        # One worker's NaN becomes everyone's, in a dense gradient if there is one: rows would have to be copied.
        nan_or_zero = tf.where(all_finite(list(rows.values())), 0.0, float("nan"))
        if others:
            first = id(others[0][1])
            reduced[first] = reduced[first] + tf.cast(nan_or_zero, reduced[first].dtype)
        else:
            first = id(of_tables[0][1])
            rows[first] = _with_ignored_row(rows[first], nan_or_zero)
    return [((rows if id(v) in rows else reduced)[id(v)], v) for _, v in pairs]


def _with_ignored_row(slices: tf.IndexedSlices, value: tf.Tensor) -> tf.IndexedSlices:
    """One row more, for a worker may have none; optimizers of tables leave out the row id -1."""
    row = tf.fill([1, tf.shape(slices.values)[1]], tf.cast(value, slices.values.dtype))
    return tf.IndexedSlices(
        tf.concat([slices.values, row], 0), tf.concat([slices.indices, [-1]], 0), slices.dense_shape
    )
