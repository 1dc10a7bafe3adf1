"""The distributed optimizer of `tf_keras.optimizers.legacy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from sok.distributed import replicas, tables
from sok.distributed.loss_scale import aggregate
from sok.distributed.reduction import Average, Pair, check_op, reduce_dense, split_pairs
from sok.job.transport.ordering import after_answers
from sok.table.table import is_embedding_variable


@tf_keras.saving.register_keras_serializable(package="sok")
class TfKerasLegacyDistributedOptimizer(tf_keras.optimizers.legacy.Optimizer):
    """See `sok.DistributedOptimizer`. State, learning rate and step count are those of `inner`."""

    # Tells Keras that `apply_gradients` knows `experimental_aggregate_gradients`.
    _HAS_AGGREGATE_GRAD = True

    def __init__(
        self, optimizer: Any, embedding_optimizer: Any = None, op: str = Average, name: str | None = None
    ) -> None:
        super().__init__(name=name or "DistributedOptimizer")
        self.inner = optimizer
        self.op = check_op(op)
        self._given = embedding_optimizer
        self._tables = tables.TableTrainer(optimizer, embedding_optimizer, self.op)
        # For checkpoints: legacy optimizers do not look for children among their attributes. Slots are the inner one's
        # alone, so the methods that list slots are not handed on: what is listed twice cannot be saved.
        self._track_trackable(optimizer, "inner")
        if embedding_optimizer is not None:
            self._track_trackable(embedding_optimizer, "embedding_optimizer")

    @property
    def embedding_optimizer(self) -> Any:
        """The optimizer of the tables."""
        return self._tables.optimizer

    def _aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        # For tf_keras' LossScaleOptimizer, which calls apply_gradients without experimental_aggregate_gradients then.
        return aggregate(grads_and_vars, self.op)

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """As in tf_keras. Without `experimental_aggregate_gradients` they are those of all workers already."""
        reduces = experimental_aggregate_gradients
        replicas.start_in_fit(self)
        of_tables, others = split_pairs(grads_and_vars)
        reduced = reduce_dense(others, self.op, of_tables) if reduces else [grad for grad, _ in others]
        has_table_step = any(grad is not None for grad, _ in of_tables)
        has_dense_step = any(grad is not None for grad in reduced)
        with tf.init_scope():
            # The tables' optimizer may count in it.
            self.inner.iterations  # noqa: B018 (made by asking)
        update = self._tables.apply(of_tables, counts_step=not has_dense_step, reduces=reduces)
        with after_answers(), tf.control_dependencies([] if update is None else [update]):
            if has_dense_step or not has_table_step:
                pairs = [(grad, variable) for grad, (_, variable) in zip(reduced, others, strict=True)]
                result = self.inner.apply_gradients(pairs, name, experimental_aggregate_gradients)
            elif self._tables.shares_iterations:
                result = tf.no_op()
            else:
                # As the base class: a LossScaleOptimizer wants an op of both its branches.
                result = self.inner.iterations.assign_add(1, read_value=False)
        is_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
        return tf.group(update, result) if is_v1_graph and update is not None else result

    # What is asked of an optimizer is asked of the inner one.

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    lr = learning_rate

    @property
    def iterations(self) -> Any:
        return self.inner.iterations

    @iterations.setter
    def iterations(self, variable: Any) -> None:
        self.inner.iterations = variable

    def get_slot(self, var: Any, slot_name: str) -> Any:
        return (self.embedding_optimizer if is_embedding_variable(var) else self.inner).get_slot(var, slot_name)

    @property
    def weights(self) -> list[Any]:
        return [*self.inner.weights, *self._tables.own_variables]

    def variables(self) -> list[Any]:
        return self.weights

    def _create_all_weights(self, var_list: Sequence[Any]) -> None:
        _, others = split_pairs((v, v) for v in var_list)
        self.inner._create_all_weights([v for v, _ in others])

    def get_config(self) -> dict[str, Any]:
        return {
            "optimizer": tf_keras.optimizers.serialize(self.inner),
            "embedding_optimizer": tables.serialize(self._given),
            "op": self.op,
            "name": self._name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        config = dict(config)
        config["optimizer"] = tf_keras.optimizers.deserialize(
            config["optimizer"], custom_objects, use_legacy_optimizer=True
        )
        config["embedding_optimizer"] = tables.deserialize(config.get("embedding_optimizer"))
        return cls(**config)
