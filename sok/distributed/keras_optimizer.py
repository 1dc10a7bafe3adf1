"""The distributed optimizer of Keras 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from sok.base import keras_calls
from sok.base.graph_ops import variables_at_once
from sok.base.types import StockOptimizer, TensorLike
from sok.distributed.reduction import Pair, split_pairs
from sok.distributed.tables import HandsOn
from sok.optimizers.loss_scaling import follow_loss_scaler


@keras.saving.register_keras_serializable(package="sok")
class KerasDistributedOptimizer(HandsOn, keras.optimizers.Optimizer):
    """See `sok.DistributedOptimizer`. State, learning rate and step count are those of `inner`."""

    _serialize = staticmethod(keras.saving.serialize_keras_object)
    _deserialize = staticmethod(keras.saving.deserialize_keras_object)

    def __init__(self, optimizer: StockOptimizer, name: str | None = None, **tables: Any) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self._hold(optimizer, **tables)
        # What the base class made for itself has no use: one counter and one learning rate for everything.
        self._iterations = optimizer._iterations
        self._learning_rate = optimizer._learning_rate

    def build(self, variables: Sequence[Any]) -> None:
        variables = list(variables)
        follow_loss_scaler()
        self._weigh_what_is_scaled(keras_calls.loss_scaler())
        embeddings, others = split_pairs((v, v) for v in variables)
        if embeddings:
            self._refuse_accumulation()
            self.embedding_optimizer.build([v for v, _ in embeddings])
        self.inner.build([v for v, _ in others])
        self._trainable_variables = variables
        self.built = True

    def _weigh_what_is_scaled(self, scaler: Any) -> None:
        """Has a `LossScaleOptimizer` weigh the loss by samples, too: it does not ask the optimizer inside."""
        if scaler is None:
            return

        def scale_loss(loss: TensorLike) -> Any:
            share = self._tables.samples_of_step(is_scaled=True)
            loss = type(scaler).scale_loss(scaler, loss)
            return loss if share is None else loss * keras.ops.cast(share, loss.dtype)

        scaler.scale_loss = scale_loss

    def _refuse_accumulation(self) -> None:
        if self.inner.gradient_accumulation_steps:
            raise ValueError(
                "`gradient_accumulation_steps` does not work with embedding tables, which are updated at every step. "
                f"Received: {self.inner.gradient_accumulation_steps}."
            )

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if trainable_variables is None and not self.built:
            raise ValueError("Call build(variables) first, or pass `trainable_variables`.")
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:
            with variables_at_once():
                self.build(variables)

        def dense_step(pairs: list[Pair]) -> None:
            self.inner.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])

        scale = 1.0 / (self.inner.loss_scale_factor or 1.0)
        pairs = zip(grads, variables, strict=True)
        self._tables.step(
            pairs,
            dense_step,
            lambda: self._iterations.assign_add(1),
            scale=scale,
            keeps_slices=_looks_at_each_slice(self.inner),
        )

    @property
    def variables(self) -> list[Any]:
        return [*self.inner.variables, *self._tables.own_variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def scale_loss(self, loss: TensorLike) -> Any:
        samples = self._tables.samples_of_step()
        loss = self.inner.scale_loss(loss)
        return loss if samples is None else loss * keras.ops.cast(samples, loss.dtype)


def _looks_at_each_slice(optimizer: Any) -> bool:
    """Whether an optimizer does something else with slices of equal ids than with their sum: squares them, say."""
    # It adds gradients up itself; or fails with slices.
    if optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor:
        return False
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    return bool(clips) or type(optimizer).update_step is not keras.optimizers.SGD.update_step
