"""`DistributedOptimizer`: a stock optimizer that trains dense weights and tables on all workers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok import optimizers
from sok.base import strategies
from sok.base.types import StockOptimizer
from sok.distributed.reduction import Average, check_op
from sok.job import context
from sok.optimizers.stock import stock_bases


def DistributedOptimizer(
    optimizer: StockOptimizer,
    embedding_optimizer: optimizers.Optimizer | str | None = None,
    op: str = Average,
    name: str | None = None,
) -> Any:
    """Returns an optimizer of the same family that trains a model with tables on all workers as on one.

    Gradients of ordinary variables are averaged (or summed) over the workers in one collective and go to `optimizer`;
    those of embedding variables stay with the workers that own the rows, are scaled alike, and go to
    `embedding_optimizer`. So N workers whose losses are means over local batches of equal size train as one worker with
    the mean over the whole batch. On one worker it does the same without collectives.

    Args:
        optimizer: a Keras 3 optimizer, a tf_keras one (new or `legacy`), or a `tf.compat.v1.train.Optimizer`. It is
            used, not copied. A name ('adam') or configuration is what `tf.keras.optimizers.get` makes of it.
        embedding_optimizer: one of `sok.optimizers` for the tables, with its own learning rate and step count. None:
            the one that matches (`sok.optimizers.matching_optimizer`), which shares `optimizer`'s learning rate, so
            that schedules and `LearningRateScheduler` act on both, and (but for v1 optimizers) its step count. 'lazy':
            the same, but rows outside the batch stay as they are (`matching_optimizer(lazy=True)`).
        op: `sok.Average` ('average', the default) or `sok.Sum` ('sum', for losses that are sums).
        name: of the optimizer returned.

    Returns:
        For Keras 3 a `keras.optimizers.Optimizer`, for tf_keras a `tf_keras.optimizers.Optimizer` or
        `tf_keras.optimizers.legacy.Optimizer`, else a `tf.compat.v1.train.Optimizer`: for `compile`, `apply_gradients`
        and `minimize`. Its `inner` is `optimizer`, its `embedding_optimizer` that of the tables.

    Under a `tf.distribute` strategy of several replicas, with tf_keras (docs/strategies.md), it does as optimizers do
    there: gradients are summed, those of ordinary variables by the strategy, and losses are scaled for that. `op` is
    not asked.

    Raises:
        TypeError: `optimizer` is none of these.
        ValueError: it is distributed already, or scales losses; a name that Keras does not know; or, at the first step
            with a table, no optimizer matches.
        RuntimeError: this process is one of several workers, and `sok.Init` has not been called; or a `tf.distribute`
            strategy is in force, here or at a step, that tables do not know, or not with this Keras.

    Things to know:
        - Collective: every worker makes the same number of steps. In Keras' `fit` a worker that has no more batches in
          an epoch takes part in the steps of the others, with no ids and no gradients, until none has any; where a
          callback stops one, all stop after that epoch. Steps with lookups in a `tf.function`, loop or branch of your
          own cannot be joined: unequal numbers are then a ValueError on all workers. Elsewhere give all as many.
        - 'average' weighs workers by their samples in Keras' own `train_step`: a step has the mean over the samples of
          all workers. In a loop, or `train_step`, of your own all workers that have a batch weigh the same.
        - `clipnorm`, `global_clipnorm` and `clipvalue` of `optimizer` see dense gradients only, after they were
          reduced. A matching optimizer clips tables by `clipnorm` and `clipvalue` too; with `global_clipnorm` none
          matches.
        - Under Keras 3 a gradient that is `tf.IndexedSlices`, as `Embedding` layers over ordinary variables have, stays
          so: one collective more, for all of them, gives each worker those of all. Most optimizers of Keras 3 square
          slices of equal ids one by one, and would make something else of their sum. It is reduced as dense ones are
          for SGD without clipping, and with `gradient_accumulation_steps` or `loss_scale_factor`.
        - Which gradients are None, or slices, must not depend on the worker; if it does, all workers raise (which may
          take until the deadline of `sok.Init` where a dense gradient is in the place of the only slices).
        - Replicas must start alike. In the first `fit` they do: worker 0's weights reach all before the first step
          (with run_eagerly=True: before its update), unless a `sok.callbacks.BroadcastVariablesCallback` takes another
          worker's. Elsewhere call `sok.broadcast_variables`, or in a v1 session use
          `sok.hooks.BroadcastVariablesHook`. Who forgets it is told: the second step compares checksums of the
          variables, and raises on all workers if they differ (not in v1 graphs). So does the second step of each later
          `fit` (not with optimizers of `tf_keras.optimizers.legacy`).
        - It reduces in `apply_gradients`. But a v1 optimizer whose `compute_gradients` was called in this graph has
          done it there, so that what you do to gradients in between (clipping) sees those of all workers.
        - Do not use it with `sok.DistributedGradientTape`, which reduces too.
        - Under the policies `mixed_float16` and `mixed_bfloat16` tables and their optimizers stay in float32. The
          `LossScaleOptimizer` of `mixed_float16` goes around this optimizer, where `compile` puts it; tables get
          unscaled gradients, and a step with one that is not finite on any worker is left out on all, which one more
          small collective decides.

    Example:
        >>> import keras, sok
        >>> optimizer = sok.DistributedOptimizer(keras.optimizers.Adam(1e-3))
        >>> isinstance(optimizer, keras.optimizers.Optimizer)
        True

    Source: the role of Horovod's `DistributedOptimizer`, which under Keras 3 reduces nothing.
    """
    strategies.refuse("sok.DistributedOptimizer", may_be_shared=True)
    check_op(op)
    context.get_transport()  # says so if it is too early
    if isinstance(optimizer, (str, dict)):
        optimizer = tf.keras.optimizers.get(optimizer)
    if type(optimizer).__name__.startswith("LossScaleOptimizer"):
        raise ValueError(
            "`optimizer` must not scale losses: put the LossScaleOptimizer around sok.DistributedOptimizer(inner "
            f"optimizer), as compile() does under the policy 'mixed_float16'. Received: {optimizer!r}."
        )
    strategies.refuse("sok.DistributedOptimizer", optimizer, may_be_shared=True)
    kinds = [kind for kind, base in stock_bases().items() if isinstance(optimizer, base)]
    if "v1" in kinds:
        strategies.refuse_where_they_add_up(
            "sok.DistributedOptimizer of a tf.compat.v1.train optimizer", "Give it one of tf_keras"
        )
        from sok.distributed.v1_optimizer import V1DistributedOptimizer as family
    elif "keras" in kinds:
        from sok.distributed.keras_optimizer import KerasDistributedOptimizer as family
    elif "tf_keras" in kinds:
        from sok.distributed.tf_keras_optimizer import TfKerasDistributedOptimizer as family
    elif "legacy" in kinds:
        from sok.distributed.tf_keras_legacy_optimizer import TfKerasLegacyDistributedOptimizer as family
    else:
        raise TypeError(
            "`optimizer` must be a Keras 3, tf_keras or tf.compat.v1.train optimizer. For tables alone use "
            f"sok.optimizers with a sok.DistributedGradientTape. Received: {optimizer!r}."
        )
    if hasattr(optimizer, "inner") and type(optimizer).__module__.startswith("sok."):
        raise ValueError(f"`optimizer` is distributed already. Received: {optimizer!r}.")
    return family(optimizer, name, embedding_optimizer=embedding_optimizer, op=op)
