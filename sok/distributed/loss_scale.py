"""Loss scaling on several workers: what they weigh, and whether a step takes place, asked of tables too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok.distributed.reduction import Pair
from sok.job import context
from sok.job.transport.ordering import after_answers
from sok.optimizers.loss_scaling import all_finite


def share_of_mean(samples: tf.Tensor) -> tf.Tensor:
    """`samples` of this worker, float32 [], over the mean of all workers; a worker without a batch gives 0.

    Collective: 4 bytes. Where a lookup of the step raises, no worker takes part.
    """
    name = context.unique_collective_name("sok/samples")
    with after_answers():
        samples = tf.identity(samples)
    (mean,) = context.get_transport().grouped_all_reduce([samples], name, average=True)
    return tf.math.divide_no_nan(samples, mean)


def with_nan_of_rows(others: Sequence[Pair], of_tables: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """What a tf_keras `LossScaleOptimizer` is given to look whether gradients are finite: those of all workers.

    Its own look then finds the same everywhere: sums of dense gradients hold the NaN of any worker, and a NaN in rows,
    which stay with their owners, is told to all.

    Args:
        others: (reduced gradient, variable), dense.
        of_tables: (gradient, table); no gradient is None.

    Returns:
        Both, of which the first gradient has a NaN on all workers if one of a table is not finite on any.

    Collective if there are tables: 4 bytes.
    """
    others, of_tables = list(others), list(of_tables)
    if of_tables:
        nan_or_zero = tf.where(all_finite([grad for grad, _ in of_tables]), 0.0, float("nan"))
        first: Any = (others or of_tables)[0]
        # Rather in a dense gradient: rows would have to be copied.
        if others:
            others[0] = first[0] + tf.cast(nan_or_zero, first[0].dtype), first[1]
        else:
            of_tables[0] = _with_ignored_row(first[0], nan_or_zero), first[1]
    return others, of_tables


def _with_ignored_row(slices: tf.IndexedSlices, value: tf.Tensor) -> tf.IndexedSlices:
    """One row more, for a worker may have none; optimizers of tables leave out the row id -1."""
    row = tf.fill([1, tf.shape(slices.values)[1]], tf.cast(value, slices.values.dtype))
    return tf.IndexedSlices(
        tf.concat([slices.values, row], 0), tf.concat([slices.indices, [-1]], 0), slices.dense_shape
    )
