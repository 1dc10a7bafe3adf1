"""The distributed optimizer of tf_keras (its new optimizers)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tf_keras

from sok.distributed import replicas, tables
from sok.distributed.loss_scale import aggregate
from sok.distributed.reduction import Average, Pair, Sum, check_op, reduce_dense, split_pairs
from sok.job.transport.ordering import after_answers


@tf_keras.saving.register_keras_serializable(package="sok")
class TfKerasDistributedOptimizer(tf_keras.optimizers.Optimizer):
    """See `sok.DistributedOptimizer`. State, learning rate and step count are those of `inner`."""

    def __init__(
        self, optimizer: Any, embedding_optimizer: Any = None, op: str = Average, name: str | None = None
    ) -> None:
        # Before the base class, whose constructor sets what the properties below hand on.
        self.inner = optimizer
        self.op = check_op(op)
        self._given = embedding_optimizer
        self._tables = tables.TableTrainer(optimizer, embedding_optimizer, self.op)
        super().__init__(name=name or "DistributedOptimizer", jit_compile=False)

    def _create_iteration_variable(self) -> None:
        self._iterations = self.inner._iterations

    @property
    def embedding_optimizer(self) -> Any:
        """The optimizer of the tables."""
        return self._tables.optimizer

    def build(self, var_list: Sequence[Any]) -> None:
        embeddings, others = split_pairs((v, v) for v in var_list)
        if embeddings:
            self.embedding_optimizer.build([v for v, _ in embeddings])
        self.inner.build([v for v, _ in others])
        self._built = True

    def aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        """For tf_keras' `LossScaleOptimizer`, which calls `apply_gradients` with `skip_gradients_aggregation` then."""
        return aggregate(grads_and_vars, self.op)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Pair],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in tf_keras. With `skip_gradients_aggregation` the gradients are those of all workers already."""
        reduces = not skip_gradients_aggregation and kwargs.pop("experimental_aggregate_gradients", True)
        replicas.start_in_fit(self)
        of_tables, others = split_pairs(grads_and_vars)
        reduced = reduce_dense(others, self.op, of_tables) if reduces else [grad for grad, _ in others]
        has_table_step = any(grad is not None for grad, _ in of_tables)
        has_dense_step = any(grad is not None for grad in reduced)
        self._tables.apply(of_tables, counts_step=not has_dense_step, reduces=reduces)
        if has_dense_step or not has_table_step:
            pairs = [(grad, variable) for grad, (_, variable) in zip(reduced, others, strict=True)]
            with after_answers():
                self.inner.apply_gradients(pairs, name=name, **kwargs)
        elif not self._tables.shares_iterations:
            self.inner.iterations.assign_add(1)
        self._built = True
        return self.inner.iterations

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

    @property
    def variables(self) -> Any:
        # The base class' list can also be called, as in tf_keras 2.10 and before.
        return type(self.inner.variables)([*self.inner.variables, *self._tables.own_variables])

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
            "optimizer": tf_keras.optimizers.serialize(self.inner),
            "embedding_optimizer": tables.serialize(self._given),
            "op": self.op,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        config = {key: value for key, value in config.items() if key != "is_legacy_optimizer"}
        config["optimizer"] = tf_keras.optimizers.deserialize(config["optimizer"], custom_objects)
        config["embedding_optimizer"] = tables.deserialize(config.get("embedding_optimizer"))
        return cls(**config)


class TfKerasTablesOptimizer(TfKerasDistributedOptimizer):
    """One of `sok.optimizers` as an optimizer of tf_keras, for its `LossScaleOptimizer`. It trains tables alone.

    Args:
        optimizer: one of `sok.optimizers`.
    """

    def __init__(self, optimizer: Any) -> None:
        # The one of dense variables, which get none of it, counts the steps.
        super().__init__(tf_keras.optimizers.SGD(0.0), optimizer, Sum, optimizer.name)

    def build(self, var_list: Sequence[Any]) -> None:
        self.embedding_optimizer.build(var_list)
        super().build(var_list)

    @property
    def learning_rate(self) -> Any:
        return self.embedding_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.embedding_optimizer.learning_rate = value

    lr = learning_rate
