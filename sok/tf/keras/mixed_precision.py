"""`LossScaleOptimizer`, where SOK v1 had it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.base.types import StockOptimizer
from sok.optimizers import Optimizer

__all__ = ["LossScaleOptimizer"]


def LossScaleOptimizer(inner_optimizer: StockOptimizer, *args: Any, **kwargs: Any) -> Any:
    """Returns the `LossScaleOptimizer` of `tf.keras`, which may be put around one of `sok.optimizers`, too.

    Args:
        inner_optimizer: an optimizer of `tf.keras`, which trains tables inside `sok.OptimizerScope`, or one of
            `sok.optimizers`, which trains nothing else. The class of Keras 3 takes that by itself; that of tf_keras
            takes Keras optimizers alone.
        *args, **kwargs: what that class takes besides: `initial_scale`, `dynamic_growth_steps`, ... With tf_keras the
            second by position may be what SOK v1 has there: a number, a scale that stays, or 'dynamic'.

    Several workers agree on the steps that are left out where `inner_optimizer` is one of `sok.optimizers` or a
    `sok.DistributedOptimizer`; under Keras 3 whatever it is.

    Example:
        >>> import sok
        >>> scaler = sok.tf.keras.mixed_precision.LossScaleOptimizer(sok.optimizers.Adam(0.1), initial_scale=8.0)
        >>> scaler.initial_scale
        8.0
    """
    scaler = tf.keras.mixed_precision.LossScaleOptimizer
    if isinstance(inner_optimizer, Optimizer) and scaler.__module__.startswith("tf_keras."):
        from sok.distributed.tf_keras_optimizer import TfKerasTablesOptimizer

        inner_optimizer = TfKerasTablesOptimizer(inner_optimizer)
    if args[:1] == ("dynamic",):
        args = args[1:]
    elif args and not isinstance(args[0], bool) and scaler.__module__.startswith("tf_keras."):
        return scaler(inner_optimizer, dynamic=False, initial_scale=args[0])
    return scaler(inner_optimizer, *args, **kwargs)
