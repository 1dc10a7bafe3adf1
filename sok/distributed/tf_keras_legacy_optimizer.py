"""The distributed optimizer of `tf_keras.optimizers.legacy`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from sok.base import keras_calls
from sok.base.types import StockOptimizer, Variable
from sok.distributed.reduction import Pair, split_pairs
from sok.distributed.tables import HandsOn
from sok.table.table import is_embedding_variable


@tf_keras.saving.register_keras_serializable(package="sok")
class TfKerasLegacyDistributedOptimizer(HandsOn, tf_keras.optimizers.legacy.Optimizer):
    """See `sok.DistributedOptimizer`. State, learning rate and step count are those of `inner`."""

    # Tells Keras that `apply_gradients` knows `experimental_aggregate_gradients`.
    _HAS_AGGREGATE_GRAD = True

    _serialize = staticmethod(tf_keras.optimizers.serialize)
    _deserialize = staticmethod(functools.partial(tf_keras.optimizers.deserialize, use_legacy_optimizer=True))
    lr = HandsOn.learning_rate

    def __init__(self, optimizer: StockOptimizer, name: str | None = None, **tables: Any) -> None:
        super().__init__(name=name or "DistributedOptimizer")
        self._hold(optimizer, **tables)
        self.name = self._name
        # For checkpoints: legacy optimizers do not look for children among their attributes. Slots are the inner one's
        # alone, so the methods that list slots are not handed on: what is listed twice cannot be saved.
        self._track_trackable(optimizer, "inner")
        if self._given is not None:
            self._track_trackable(self._given, "embedding_optimizer")

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> list[Pair]:
        # In `fit` on several workers times the number of samples, by which a step weighs workers.
        if grad_loss is None and tape is not None and not callable(loss):
            samples = self._tables.samples_of_step(keras_calls.loss_scaler() is not None)
            grad_loss = None if samples is None else tf.cast(samples, loss.dtype)
        return super()._compute_gradients(loss, var_list, grad_loss, tape)

    def _aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        # For tf_keras' LossScaleOptimizer, which calls apply_gradients without experimental_aggregate_gradients then.
        return self._tables.aggregated(grads_and_vars)

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """As in tf_keras. Without `experimental_aggregate_gradients` they are those of all workers already."""
        with tf.init_scope():
            # The tables' optimizer may count in it.
            self.inner.iterations  # noqa: B018 (made by asking)
        update, result = self._tables.step(
            grads_and_vars,
            lambda pairs: self.inner.apply_gradients(pairs, name, experimental_aggregate_gradients),
            lambda: self.inner.iterations.assign_add(1, read_value=False),
            experimental_aggregate_gradients,
        )
        # As the base class: a LossScaleOptimizer wants an op of both its branches.
        result = tf.no_op() if result is None else result
        is_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
        return tf.group(update, result) if is_v1_graph and update is not None else result

    def get_slot(self, var: Variable, slot_name: str) -> Any:
        return (self.embedding_optimizer if is_embedding_variable(var) else self.inner).get_slot(var, slot_name)

    @property
    def weights(self) -> list[Any]:
        return [*self.inner.weights, *self._tables.own_variables]

    def variables(self) -> list[Any]:
        return self.weights

    def _create_all_weights(self, var_list: Sequence[Any]) -> None:
        _, others = split_pairs((v, v) for v in var_list)
        self.inner._create_all_weights([v for v, _ in others])
