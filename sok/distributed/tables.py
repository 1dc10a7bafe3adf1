"""A step of a stock optimizer and of the one that trains the tables beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import keras_calls, strategies
from sok.base.graph_ops import variables_at_once
from sok.base.types import Rate, Scalar, StockOptimizer, Variable
from sok.distributed import joining, replicas
from sok.distributed.loss_scale import share_of_mean, with_nan_of_rows
from sok.distributed.reduction import Average, Pair, Sum, check_op, reduce_weighted, split_pairs, table_scale
from sok.distributed.tape import is_reduced
from sok.job import context
from sok.job.transport.ordering import after_answers
from sok.optimizers import Optimizer, matching_optimizer
from sok.table.state import count_step
from sok.table.table import is_embedding_variable

# Called where hvd.DistributedOptimizer is put around one of ours.
tell_op_of_horovod: Callable[[str], None] | None = None


class TableTrainer:
    """Trains tables with the optimizer given, or with one that matches the stock optimizer, beside that one.

    Args:
        stock: the optimizer of everything else.
        given: a `sok.optimizers.Optimizer`, or None; 'lazy': the lazy form of the one that matches.
        op: 'average' or 'sum'.
        owner: the distributed optimizer of TF 1 whose checkpoints are to have the optimizer of the tables, once there
            is one. None: `stock` is one of Keras, in whose `iterations` a matching optimizer counts.
    """

    def __init__(
        self, stock: StockOptimizer, given: Optimizer | str | None, op: str, owner: StockOptimizer | None = None
    ) -> None:
        self._is_lazy = isinstance(given, str) and given == "lazy"
        given = None if self._is_lazy else given
        if given is not None and not isinstance(given, Optimizer):
            raise TypeError(
                "`embedding_optimizer` must be one of sok.optimizers (SGD, Adagrad, Adam, LazyAdam), None for the one "
                f"that matches, or 'lazy' for its lazy form. Received: {given!r}."
            )
        self._stock = stock
        self._optimizer = given
        self._op = op
        self._owner = owner
        self.shares_iterations = given is None and owner is None
        self._samples: Any = None  # of the step that is being built, if its loss is weighted by them
        self.shares_samples = False  # whether as parts of the mean of all workers
        # A variable, bool, while a worker without a batch makes, or builds, a step: whether any worker has one.
        self.joins: tf.Variable | None = None
        self._track()

    def samples_of_step(self, is_scaled: bool = False) -> Any:
        """How many samples the batch of Keras' `train_step` has, with which its loss is to be multiplied; or None.

        Where a step averages over workers: those with more samples then weigh more.

        Args:
            is_scaled: whether a loss scale is at work. Then it is the number in parts of the mean of all workers: what
                16 bits just hold must not grow by a batch.

        Collective if `is_scaled` and it is not None: 4 bytes.
        """
        self._samples, self.shares_samples = None, False
        if (
            strategies.add_up()
            or self._op != Average
            or context.size() == 1
            or not tf.compat.v1.executing_eagerly_outside_functions()
        ):
            return None
        self._samples = joining.num_samples(keras_calls.batch_of_step())
        if is_scaled and self._samples is not None:
            self._samples, self.shares_samples = share_of_mean(self._samples), True
        return self._samples

    def _taken_samples(self) -> Any:
        """What gradients were multiplied with; 1 in steps of Keras' that others may join; else None."""
        samples, self._samples = self._samples, None
        if self._owner is not None or context.size() == 1:
            return None
        return samples if samples is not None else 1.0 if keras_calls.model_that_trains() is not None else None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the tables. A matching one is made when first asked for.

        Raises:
            ValueError: there is none that matches.
        """
        if self._optimizer is None:
            with variables_at_once():
                self._optimizer = matching_optimizer(self._stock, self.shares_iterations, lazy=self._is_lazy)
            self._track()
        return self._optimizer

    def _track(self) -> None:
        if self._owner is not None and self._optimizer is not None:
            self._owner._track_trackable(self._optimizer, "embedding_optimizer")

    @property
    def own_variables(self) -> list[Any]:
        """Variables of the tables' optimizer that the stock optimizer does not have: all of a given one."""
        if self._optimizer is None or self.shares_iterations:
            return []
        return list(self._optimizer.variables)

    def step(
        self,
        grads_and_vars: Iterable[Pair],
        dense_step: Callable[[list[Pair]], Any],
        count: Callable[[], Any],
        reduces: bool = True,
        scale: Scalar = 1.0,
        keeps_slices: bool = False,
    ) -> tuple[Any, Any]:
        """Does one step on all workers: reduces dense gradients, updates the tables, then the other variables.

        Args:
            grads_and_vars: (gradient, variable), of tables and others; gradients may be None.
            dense_step: the stock optimizer's step with the pairs that are left to it. Not called if these have no
                gradient while a table has one.
            count: counts a step that the stock optimizer does not see and the tables' optimizer counts for itself.
            reduces: False if gradients are those of all workers already.
            scale: another factor for the gradients of tables.
            keeps_slices: whether `dense_step` gets gradients that are slices as those of all workers, not as their sum.

        Returns:
            In a v1 graph the op that updates the tables, else None; and what `dense_step` or `count` gave, or None.
        """
        strategies.refuse("sok.DistributedOptimizer", self._stock, may_be_shared=True)
        if strategies.add_up():
            # By `dense_step`; and owners hold the sum over all workers, as it makes of others.
            joining.forget_step()
            reduces = False
        else:
            replicas.start_in_fit(self)
        of_tables, others = split_pairs(grads_and_vars)
        reduced: list[Any] = [grad for grad, _ in others]
        if reduces:
            reduced, by_samples = self._reduced(of_tables, others, keeps_slices)
            scale = scale * by_samples
        with variables_at_once():
            if self.joins is None:
                return self._change(of_tables, others, reduced, dense_step, count, reduces, scale)

            def change() -> tf.Tensor:
                self._change(of_tables, others, reduced, dense_step, count, reduces, scale)
                return tf.constant(True)

            tf.cond(self.joins, change, lambda: tf.constant(False))
        return None, None

    def aggregated(self, grads_and_vars: Iterable[Pair]) -> list[Pair]:
        """For a `LossScaleOptimizer` of tf_keras: the pairs in order, to be applied without reducing them again.

        Args:
            grads_and_vars: pairs whose gradients are not None.

        Collective if there are several workers: the dense gradients, and 4 bytes if there are tables.
        """
        strategies.refuse_where_they_add_up(
            "A LossScaleOptimizer around sok.DistributedOptimizer", "Use the policies float32 or mixed_bfloat16"
        )
        pairs = list(grads_and_vars)
        if context.size() == 1 or not pairs:
            return pairs
        of_tables, others = split_pairs(pairs)
        reduced, scale = self._reduced(of_tables, others)
        scale = scale * table_scale(self._op)
        rows = [(tf.IndexedSlices(grad.values * scale, grad.indices, grad.dense_shape), v) for grad, v in of_tables]
        both = with_nan_of_rows([(grad, v) for grad, (_, v) in zip(reduced, others, strict=True)], rows)
        found = {id(v): grad for part in both for grad, v in part}
        return [(found[id(v)], v) for _, v in pairs]

    def _reduced(
        self, of_tables: Sequence[Pair], others: Sequence[Pair], keeps_slices: bool = False
    ) -> tuple[list[Any], Any]:
        """The dense gradients of all workers, and what those of tables are to be multiplied with."""
        if self.joins is None:
            joining.note_step(self, of_tables, others)
            reduced, mean = reduce_weighted(others, self._op, of_tables, self._taken_samples(), keeps_slices)
        else:
            reduced, mean = reduce_weighted(others, self._op, of_tables, 0.0, keeps_slices)
            assert mean is not None
            self.joins.assign(mean > 0.0)
        return reduced, 1.0 if mean is None or self._op != Average else tf.math.divide_no_nan(1.0, mean)

    def _change(
        self,
        of_tables: Sequence[Pair],
        others: Sequence[Pair],
        reduced: Sequence[Any],
        dense_step: Callable[[list[Pair]], Any],
        count: Callable[[], Any],
        reduces: bool,
        scale: Any,
    ) -> tuple[Any, Any]:
        """Updates the tables, then the other variables, by reduced gradients."""
        has_table_step = any(grad is not None for grad, _ in of_tables)
        has_dense_step = any(grad is not None for grad in reduced)
        # Before the stock optimizer's, whose counter it may share.
        if has_table_step:
            update = self._update(of_tables, not has_dense_step, reduces, scale)
        else:
            tables = [table for _, table in of_tables]
            update = None
            if not strategies.once_for_all(lambda _: count_step(tables), []):
                update = count_step(tables)
        with after_answers(), tf.control_dependencies([] if update is None else [update]):
            if has_dense_step or not has_table_step:
                return update, dense_step(
                    [(grad, variable) for grad, (_, variable) in zip(reduced, others, strict=True)]
                )
            return update, None if self.shares_iterations else count()

    def _update(self, pairs: Sequence[Pair], counts_step: bool, reduces: bool, scale: Any) -> Any:
        if reduces and any(grad is not None and is_reduced(grad) for grad, _ in pairs):
            raise ValueError(
                "These gradients come from a sok.DistributedGradientTape, which has reduced them over all workers, and "
                "sok.DistributedOptimizer would do so again. Use a tf.GradientTape with it, or stock optimizers and "
                "sok.optimizers with the distributed tape."
            )
        if reduces:
            scale *= table_scale(self._op)
        return self.optimizer._apply(
            list(pairs),
            gradient_scale=None if isinstance(scale, float) and scale == 1.0 else scale,
            counts_step=counts_step or not self.shares_iterations,
        )


class HandsOn:
    """What all distributed optimizers have: a stock optimizer `inner`, of which they answer what they are asked.

    It comes before a library's class among the bases. Its constructors take `inner` and a name, and hand on to `_hold`
    what else `sok.DistributedOptimizer` is given.
    """

    _serialize: Callable[..., Any]
    _deserialize: Callable[..., Any]
    name: str

    def _hold(self, inner: Any, embedding_optimizer: Any = None, op: str = Average, owner: Any = None) -> None:
        self.inner, self.op, self._given = inner, check_op(op), embedding_optimizer
        self._tables = TableTrainer(inner, embedding_optimizer, self.op, owner)

    @property
    def embedding_optimizer(self) -> Any:
        """The optimizer of the tables."""
        return self._tables.optimizer

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        self.inner.learning_rate = value

    @property
    def iterations(self) -> Any:
        return self.inner.iterations

    @iterations.setter
    def iterations(self, variable: Variable) -> None:
        self.inner.iterations = variable

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        # What both Kerases call when `fit` ends.
        others = [v for v in var_list if not is_embedding_variable(v)]
        if context.size() > 1:
            replicas.end_of_fit(others)
        self.inner.finalize_variable_values(others)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Variable] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        self.inner.exclude_from_weight_decay(var_list, var_names)

    def get_config(self) -> dict[str, Any]:
        return {
            "optimizer": type(self)._serialize(self.inner),
            "embedding_optimizer": serialize(self._given),
            "op": self.op,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        config = {key: value for key, value in config.items() if key != "is_legacy_optimizer"}
        made = vars(cls).get("__init__")
        if str(getattr(made, "__module__", "")).startswith("horovod."):
            # hvd.DistributedOptimizer around it: that would reduce rows by their places. It reduces by itself.
            own: Any = cls.__mro__[1]
            op = _op_of_horovod(made)
            if tell_op_of_horovod is not None:
                tell_op_of_horovod(op)
            return own.from_config({**config, "op": op}, custom_objects)
        config["optimizer"] = cls._deserialize(config["optimizer"], custom_objects)
        config["embedding_optimizer"] = deserialize(config.get("embedding_optimizer"))
        return cls(**config)


def _op_of_horovod(constructor: Any) -> str:
    """What the class that Horovod makes of an optimizer is to do: one `op` for dense gradients and rows."""
    cells = zip(constructor.__code__.co_freevars, constructor.__closure__ or (), strict=True)
    asked = next((cell.cell_contents for name, cell in cells if name == "op"), None)
    return Sum if asked == constructor.__globals__["hvd"].Sum else Average  # Horovod takes no other


def serialize(optimizer: Optimizer | str | None) -> dict[str, Any] | str | None:
    """Writes down a tables' optimizer that was given; None and 'lazy' stay."""
    if not isinstance(optimizer, Optimizer):
        return optimizer
    return {"class_name": type(optimizer).__name__, "config": optimizer.get_config()}


def deserialize(config: dict[str, Any] | str | None) -> Any:
    """The reverse of `serialize`; anything but its dictionaries is returned as it is."""
    if not isinstance(config, dict):
        return config
    from sok import optimizers

    return getattr(optimizers, config["class_name"]).from_config(config["config"])
