"""The distributed optimizer of Keras 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from sok.distributed import replicas, tables
from sok.distributed.reduction import Average, check_op, reduce_dense, split_pairs
from sok.job.transport.ordering import after_answers
from sok.optimizers.loss_scaling import follow_loss_scaler


@keras.saving.register_keras_serializable(package="sok")
class KerasDistributedOptimizer(keras.optimizers.Optimizer):
    """See `sok.DistributedOptimizer`. State, learning rate and step count are those of `inner`."""

    def __init__(
        self, optimizer: Any, embedding_optimizer: Any = None, op: str = Average, name: str | None = None
    ) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.op = check_op(op)
        self.inner = optimizer
        self._given = embedding_optimizer
        self._tables = tables.TableTrainer(optimizer, embedding_optimizer, self.op)
        # What the base class made for itself has no use: one counter and one learning rate for everything.
        self._iterations = optimizer._iterations
        self._learning_rate = optimizer._learning_rate

    @property
    def embedding_optimizer(self) -> Any:
        """The optimizer of the tables."""
        return self._tables.optimizer

    def build(self, variables: Sequence[Any]) -> None:
        variables = list(variables)
        follow_loss_scaler()
        embeddings, others = split_pairs((v, v) for v in variables)
        if embeddings:
            self._refuse_accumulation()
            self.embedding_optimizer.build([v for v, _ in embeddings])
        self.inner.build([v for v, _ in others])
        self._trainable_variables = variables
        self.built = True

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
            self.build(variables)
        replicas.start_in_fit(self)
        of_tables, others = split_pairs(zip(grads, variables, strict=True))
        reduced = reduce_dense(others, self.op, of_tables)
        has_table_step = any(grad is not None for grad, _ in of_tables)
        has_dense_step = any(grad is not None for grad in reduced)
        scale = 1.0 / (self.inner.loss_scale_factor or 1.0)
        self._tables.apply(of_tables, counts_step=not has_dense_step, scale=scale)
        if has_dense_step or not has_table_step:
            with after_answers():
                self.inner.apply(reduced, [variable for _, variable in others])
        elif not self._tables.shares_iterations:
            self._iterations.assign_add(1)

    # What is asked of an optimizer is asked of the inner one.

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value
        self._learning_rate = self.inner._learning_rate

    @property
    def iterations(self) -> Any:
        return self.inner.iterations

    @property
    def variables(self) -> list[Any]:
        return [*self.inner.variables, *self._tables.own_variables]

    def scale_loss(self, loss: Any) -> Any:
        return self.inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        _, others = split_pairs((v, v) for v in var_list)
        self.inner.finalize_variable_values([v for v, _ in others])

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        self.inner.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Sequence[Any]) -> None:
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def get_config(self) -> dict[str, Any]:
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner),
            "embedding_optimizer": tables.serialize(self._given),
            "op": self.op,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        config = dict(config)
        config["optimizer"] = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects)
        config["embedding_optimizer"] = tables.deserialize(config.get("embedding_optimizer"))
        return cls(**config)
