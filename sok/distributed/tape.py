"""`DistributedGradientTape`: gradients as one worker on all samples would have them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.base import strategies
from sok.base.types import Gradient
from sok.distributed.reduction import Average, check_op, reduce_dense, split_pairs, table_scale
from sok.job import context
from sok.table.table import is_embedding_variable

# The first number of the dense shape of rows that are reduced. Slices of tables have no dense shape otherwise, and what
# hands slices on or clips them (a tf.function, tf.clip_by_norm) keeps it; an attribute would be lost there.
_REDUCED = -1


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` is that of all workers together.

    Gradients of ordinary variables are averaged (or summed) over the workers in one collective, and are dense (so an
    optimizer of Keras 3 squares one sum where it would square `tf.IndexedSlices` of equal ids one by one); those of
    embedding variables stay `tf.IndexedSlices` of this worker's own rows. They hold the sum over all workers already,
    and are divided by the number of workers for the average. With `op=sok.Average`, losses that are means over local
    batches of equal size, and R workers, this gives the gradients of one worker with the mean over the whole batch;
    with `sok.Sum` and losses that are sums, also for local batches of different sizes.

    **Without it** a bare tape gives table rows the sum over all workers, and dense weights only their own worker's
    gradient; Horovod's tape averages dense ones and leaves rows summed.

    Args:
        tape: a `tf.GradientTape`, entered or not, persistent or not.
        op: `sok.Average` ('average', the default) or `sok.Sum` ('sum').

    Use stock optimizers and `sok.optimizers` with its gradients. `sok.DistributedOptimizer` reduces by itself and
    refuses rows that this tape has reduced.

    Raises:
        TypeError: `tape` is no `tf.GradientTape`.
        RuntimeError: this process is one of several workers, and `sok.Init` has not been called; or a `tf.distribute`
            strategy is in force that has several replicas.

    Example:
        >>> import sok, tensorflow as tf
        >>> weight = tf.Variable([1.0, 2.0])
        >>> with sok.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = tf.reduce_sum(weight * weight)
        >>> tape.gradient(loss, [weight])[0].numpy().tolist()
        [2.0, 4.0]

    Source: the role of Horovod's `DistributedGradientTape`, which knows no sharded tables and no Keras 3 variables.
    """

    def __init__(self, tape: tf.GradientTape, op: str = Average) -> None:
        strategies.refuse("sok.DistributedGradientTape")
        strategies.refuse_where_they_add_up(
            "sok.DistributedGradientTape", "Use a tf.GradientTape, and divide losses by the global batch size"
        )
        if not isinstance(tape, tf.GradientTape):
            raise TypeError(f"`tape` must be a tf.GradientTape. Received: {tape!r}.")
        context.get_transport()  # says so if it is too early
        self._tape = tape
        self._op = check_op(op)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any) -> Any:
        """Returns the gradients of `target` with respect to `sources`, of all workers together.

        Args:
            target, output_gradients, unconnected_gradients: as in `tf.GradientTape.gradient`. ('zero' cannot be asked
                of embedding variables.)
            sources: a variable, or a list or nest of them, in the same order on all workers. Tensors are reduced like
                ordinary variables. Which sources have no gradient (None) must not depend on the worker.

        Raises:
            TypeError: a source is the handle of a variable, which does not say whose it is.
            tf.errors.InvalidArgumentError: a gradient is None on some workers only; on all workers.

        Collective, if there are ordinary variables among the sources.
        """
        flat_sources = tf.nest.flatten(sources)
        for source in flat_sources:
            if getattr(source, "dtype", None) == tf.resource:
                raise TypeError(f"`sources` must be variables, not their handles. Received: {source!r}.")
        gradients = self._tape.gradient(target, flat_sources, output_gradients, **kwargs)
        of_tables, others = split_pairs(zip(gradients, flat_sources, strict=True))
        reduced = iter(reduce_dense(others, self._op, of_tables))
        results = [
            mark_reduced(grad, table_scale(self._op)) if is_embedding_variable(source) else next(reduced)
            for grad, source in zip(gradients, flat_sources, strict=True)
        ]
        return tf.nest.pack_sequence_as(sources, results)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: reducing it over workers has no use that we know. Use the `tf.GradientTape` itself."""
        raise NotImplementedError(
            "sok.DistributedGradientTape reduces what gradient() returns, nothing else. For the jacobian of this "
            "worker alone, call jacobian() of the tf.GradientTape that it was made with."
        )

    batch_jacobian = jacobian

    def __getattr__(self, name: str) -> Any:
        # watch, stop_recording, reset, watched_variables
        if name.startswith("__") or "_tape" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._tape, name)


def is_reduced(grad: Gradient) -> bool:
    """Returns whether `grad` is that of a table, as `mark_reduced` gave it."""
    if not isinstance(grad, tf.IndexedSlices) or grad.dense_shape is None:
        return False
    shape = tf.get_static_value(grad.dense_shape)
    return shape is None or shape[0] == _REDUCED


def mark_reduced(grad: Gradient, scale: float) -> Any:
    """The gradient of a table times `scale`, marked as that of all workers together; of None None."""
    if grad is None:
        return None
    values = grad.values if scale == 1.0 else grad.values * scale
    return tf.IndexedSlices(values, grad.indices, tf.constant([_REDUCED, values.shape[-1]], grad.indices.dtype))
