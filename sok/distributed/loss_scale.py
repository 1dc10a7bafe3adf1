"""Loss scaling: whether a step takes place, asked of tables too, and of all workers together."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from sok.distributed.reduction import Pair, reduce_dense, split_pairs, table_scale
from sok.job import context
from sok.optimizers.loss_scaling import all_finite


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
