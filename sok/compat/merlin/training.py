"""Merlin's helpers of training: Horovod's signatures over those of `sok`, which know tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import sok
from sok.base.types import StockOptimizer, Variable
from sok.compat import optimizer_scope
from sok.distributed import broadcast, optimizer, tape
from sok.distributed.reduction import Average, Sum
from sok.job import context
from sok.keras.callbacks import BroadcastVariablesCallback


def begin() -> None:
    """`sok.Init`, where a script has not called it: those of Merlin call Horovod's."""
    try:
        context.get_transport()
    except RuntimeError:
        sok.Init()


def _op_of(op: Any) -> str:
    """Horovod's numbers of an average and of a sum too."""
    return {None: Average, 0: Average, 1: Sum}.get(op, op) if not isinstance(op, str) else op


def DistributedGradientTape(gradtape: tf.GradientTape, *args: Any, op: object = None, **kwargs: Any) -> Any:
    """`sok.DistributedGradientTape(gradtape)`, whose gradients stock optimizers of TensorFlow and Keras take.

    From then on, until `sok.shutdown()`, `apply_gradients` of any stock optimizer may be given tables: they have the
    optimizer of `sok.optimizers` that matches, as inside a `sok.OptimizerScope`.

    Args:
        gradtape: a `tf.GradientTape`.
        op: None or Horovod's `Average`: gradients of dense variables and rows alike are means over the workers;
            `Sum`: sums.
        *args, **kwargs: Horovod's other arguments. Taken: there is nothing to choose.

    Example:
        >>> weight = tf.Variable(2.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight * weight
        >>> float(DistributedGradientTape(tape).gradient(loss, weight))
        4.0
    """
    begin()
    optimizer_scope.open_for(context.get_job())
    return tape.DistributedGradientTape(gradtape, _op_of(op))


def DistributedOptimizer(optimizer_: StockOptimizer, *args: Any, op: object = None, **kwargs: Any) -> Any:
    """`sok.DistributedOptimizer(optimizer)`, for `fit` and `apply_gradients`.

    Args:
        optimizer_: a Keras optimizer.
        op: as in `DistributedGradientTape`.
        *args, **kwargs: Horovod's other arguments. Taken: there is nothing to choose.

    Example:
        >>> DistributedOptimizer(tf.keras.optimizers.SGD()).op
        'average'
    """
    begin()
    return optimizer.DistributedOptimizer(optimizer_, op=_op_of(op))


def broadcast_variables(variables: Sequence[Variable], root_rank: int = 0, *args: Any, **kwargs: Any) -> Any:
    """`sok.broadcast_variables`: dense variables get the values of one worker; rows of tables stay. Collective.

    Example:
        >>> broadcast_variables([tf.Variable(1.0)], root_rank=0)
    """
    begin()
    return broadcast.broadcast_variables(variables, root_rank)


class BroadcastGlobalVariablesCallback(BroadcastVariablesCallback):
    """`sok.callbacks.BroadcastVariablesCallback`: also of optimizers, what belongs to rows stays where it is.

    Args:
        root_rank: the worker whose values all get.
        *args, **kwargs: Horovod's other arguments. Taken.

    Example:
        >>> BroadcastGlobalVariablesCallback(0).root_rank
        0
    """

    def __init__(self, root_rank: int = 0, *args: Any, **kwargs: Any) -> None:
        begin()
        super().__init__(root_rank)
