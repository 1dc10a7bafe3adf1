"""The distributed optimizer of tf_keras (its new optimizers)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from sok.base import keras_calls
from sok.base.types import Rate, StockOptimizer, Variable
from sok.distributed.reduction import Pair, Sum, split_pairs
from sok.distributed.tables import HandsOn


@tf_keras.saving.register_keras_serializable(package="sok")
class TfKerasDistributedOptimizer(HandsOn, tf_keras.optimizers.Optimizer):
    """See `sok.DistributedOptimizer`. State, learning rate and step count are those of `inner`."""

    _serialize = staticmethod(tf_keras.optimizers.serialize)
    _deserialize = staticmethod(tf_keras.optimizers.deserialize)
    lr = HandsOn.learning_rate

    def __init__(self, optimizer: StockOptimizer, name: str | None = None, **tables: Any) -> None:
        # Before the base class, whose constructor sets what is handed on.
        self._hold(optimizer, **tables)
        super().__init__(name=name or "DistributedOptimizer", jit_compile=False)

    def _create_iteration_variable(self) -> None:
        self._iterations = self.inner._iterations

    def build(self, var_list: Sequence[Any]) -> None:
        embeddings, others = split_pairs((v, v) for v in var_list)
        if embeddings:
            self.embedding_optimizer.build([v for v, _ in embeddings])
        self.inner.build([v for v, _ in others])
        self._built = True

    def compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[Variable] | Callable[[], Sequence[Variable]],
        tape: tf.GradientTape | None = None,
    ) -> list[Pair]:
        """As in tf_keras; in `fit` on several workers times the number of samples, by which a step weighs workers."""
        is_scaled = keras_calls.loss_scaler() is not None
        if tape is None or callable(loss) or (samples := self._tables.samples_of_step(is_scaled)) is None:
            return super().compute_gradients(loss, var_list, tape)
        variables = var_list() if callable(var_list) else var_list
        gradients = tape.gradient(loss, variables, output_gradients=tf.cast(samples, loss.dtype))
        return list(zip(gradients, variables, strict=True))

    def aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        """For tf_keras' `LossScaleOptimizer`, which calls `apply_gradients` with `skip_gradients_aggregation` then."""
        return self._tables.aggregated(grads_and_vars)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Pair],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in tf_keras. With `skip_gradients_aggregation` the gradients are those of all workers already."""
        reduces = not skip_gradients_aggregation and kwargs.pop("experimental_aggregate_gradients", True)
        self._tables.step(
            grads_and_vars,
            lambda pairs: self.inner.apply_gradients(
                pairs, name=name, skip_gradients_aggregation=not reduces, **kwargs
            ),
            lambda: self.inner.iterations.assign_add(1),
            reduces,
        )
        self._built = True
        return self.inner.iterations

    @property
    def variables(self) -> Any:
        # The base class' list can also be called, as in tf_keras 2.10 and before.
        return type(self.inner.variables)([*self.inner.variables, *self._tables.own_variables])

    def set_weights(self, weights: Sequence[Any]) -> None:
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)


class TfKerasTablesOptimizer(TfKerasDistributedOptimizer):
    """One of `sok.optimizers` as an optimizer of tf_keras, for its `LossScaleOptimizer`. It trains tables alone.

    Args:
        optimizer: one of `sok.optimizers`.
    """

    def __init__(self, optimizer: StockOptimizer) -> None:
        # The one of dense variables, which get none of it, counts the steps.
        super().__init__(tf_keras.optimizers.SGD(0.0), optimizer.name, embedding_optimizer=optimizer, op=Sum)

    def build(self, var_list: Sequence[Any]) -> None:
        self.embedding_optimizer.build(var_list)
        super().build(var_list)

    @property
    def learning_rate(self) -> Any:
        return self.embedding_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        self.embedding_optimizer.learning_rate = value

    lr = learning_rate
