"""`OptimizerWrapper`: a stock optimizer that also trains tables, as SOK v2 makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import strategies
from sok.base.types import Rate, StockOptimizer, Variable
from sok.job.transport.ordering import after_answers
from sok.optimizers.base import Optimizer
from sok.optimizers.global_step import count_after
from sok.optimizers.matching import _match, _NoMatch, of_rule, v1_rate
from sok.optimizers.stock import stock_bases
from sok.table import rules
from sok.table.state import count_step

Pair = tuple[Any, Any]  # (gradient, variable)


class OptimizerWrapper(tf.__internal__.tracking.Trackable):
    """Applies the rule of a stock optimizer to the rows of tables that a step has touched, and to other variables.

    To tables is done what the optimizer of `sok.optimizers` with that rule does, in one fused op. It uses the stock
    optimizer's learning rate itself: schedules, and changes made later, act. Variables that are no tables go to the
    stock optimizer.

    **Rows outside the batch do not change**, as in SOK v2: Adam is `sok.optimizers.LazyAdam` here, and momentum moves a
    row only when the row is in the batch. (Stock optimizers let such rows drift on; `sok.optimizers` and
    `sok.DistributedOptimizer` do so too.)

    Gradients are not reduced: rows already hold the sum over all workers, other variables this worker's gradient only.
    Take gradients from `sok.DistributedGradientTape`, or reduce the others by Horovod.

    Args:
        optimizer: a Keras 3 optimizer, a tf_keras one (new or `legacy`) or a `tf.compat.v1.train.Optimizer`. For tables
            one of those that `sok.optimizers.matching_optimizer` knows. `clipnorm` and `clipvalue` act on tables too.
            No option may be set that tables do not have (`use_ema`, `global_clipnorm`, ...).

    Raises:
        TypeError: `optimizer` is none of these.
        ValueError: it scales losses; or, at the first step with a table, it has no rule for tables.

    Works eagerly, inside `tf.function` and in v1 graphs (there legacy tf_keras and `tf.compat.v1.train`). Slots live in
    the tables, where `sok.save` and `sok.restore` keep them, with the step count. A `tf.train.Checkpoint` of it
    holds the stock optimizer and the step count; slots come with the tables.

    Example:
        >>> import sok, tensorflow as tf
        >>> table, weight = sok.DynamicVariable(1, initializer="1"), tf.Variable([2.0])
        >>> optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.25))
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [7]) * weight)
        >>> variables = [table, weight]
        >>> optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        >>> sok.export(table)[1].numpy().tolist(), weight.numpy().tolist()
        ([[0.5]], [1.75])

    Source: `OptimizerWrapper` of SOK v2; differences are listed in docs/migrating.md.
    """

    def __init__(self, optimizer: StockOptimizer) -> None:
        strategies.refuse("sok.OptimizerWrapper")
        self._optimizer = _checked(optimizer)
        self._tables: Optimizer | None = None
        self._track_trackable(optimizer, "optimizer")

    @property
    def optimizer(self) -> Any:
        """The stock optimizer."""
        return self._optimizer

    @property
    def embedding_optimizer(self) -> Optimizer:
        """What trains the tables. It is made when first asked for.

        Raises:
            ValueError: the stock optimizer has no rule for tables.
        """
        if self._tables is None:
            self._tables = _tables_optimizer(self._optimizer)
            self._track_trackable(self._tables, "embedding_optimizer")
        return self._tables

    @property
    def learning_rate(self) -> Any:
        """That of the stock optimizer, settable where that one's is."""
        stock = self._optimizer
        if isinstance(stock, tf.compat.v1.train.Optimizer):
            return v1_rate(stock)
        return stock.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        if isinstance(self._optimizer, tf.compat.v1.train.Optimizer):
            raise AttributeError(
                "The learning rate of a tf.compat.v1.train optimizer cannot be set. Make the optimizer with a "
                "variable, a placeholder or a function, and change what that gives."
            )
        self._optimizer.learning_rate = value

    lr = learning_rate

    def get_slot(self, var: Variable, name: str) -> Any:
        """A slot of a table (see `sok.optimizers.Optimizer.get_slot`), or the stock optimizer's of a variable."""
        from sok.table.table import is_embedding_variable

        return (self.embedding_optimizer if is_embedding_variable(var) else self._optimizer).get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """The names that `get_slot` knows: those of the stock optimizer's slots so far, and those of tables."""
        of_stock: list[str] = getattr(self._optimizer, "get_slot_names", list)()  # Keras' newer optimizers have none
        return list(dict.fromkeys([*of_stock, *self.embedding_optimizer.slot_names]))

    def __dir__(self) -> list[str]:
        # TensorFlow's checkpoints look here for it, and would take slots of tables for variables.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    @property
    def _slots(self) -> Any:
        # Scripts for SOK look into it: by the name of the slot, those of tables and of other variables.
        of_tables, others = self.embedding_optimizer._slots, getattr(self._optimizer, "_slots", {})
        return {name: {**others.get(name, {}), **of_tables.get(name, {})} for name in [*others, *of_tables]}

    @property
    def iterations(self) -> tf.Variable:
        """Steps of the tables so far: int64 []."""
        return self.embedding_optimizer.iterations

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation | None:
        """Does one step of all variables given.

        Args:
            grads_and_vars: pairs (gradient, variable); tables and others in any order. Pairs without a gradient are
                left out. The gradient of a table is `tf.IndexedSlices` of its row ids, as a tape gives it.
            global_step: an integer variable that 1 is added to, or None.
            name: name scope of the ops.

        Returns:
            In a v1 graph the op that does the step; None where it is done.

        Raises:
            ValueError: see the class; the same table twice.
            TypeError: the gradient of a table is not `tf.IndexedSlices`.
            RuntimeError: the optimizer belongs to another graph.
        """
        strategies.refuse("sok.OptimizerWrapper")
        _refuse_scaled_losses(self._optimizer)
        tables, others = _split(grads_and_vars)
        has_table_step = any(grad is not None for grad, _ in tables)
        if not has_table_step and not others:
            raise ValueError("No gradients provided for any variable: the loss depends on none, or the list is empty.")
        update = self.embedding_optimizer._apply(tables, name) if has_table_step else count_step(v for _, v in tables)
        if others:
            with after_answers(), tf.control_dependencies([] if update is None else [update]):
                result = self._apply_to_others(others, name)
            update = tf.group(*[op for op in (update, result) if op is not None]) if _is_v1_graph() else None
        return count_after(update, global_step)

    def _apply_to_others(self, pairs: list[Pair], name: str | None) -> Any:
        if isinstance(self._optimizer, tf.compat.v1.train.Optimizer):
            return self._optimizer.apply_gradients(pairs, name=name)
        return self._optimizer.apply_gradients(pairs)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Pair]:
        """That of the stock `tf.compat.v1.train` optimizer."""
        self._check_v1("compute_gradients")
        return self._optimizer.compute_gradients(*args, **kwargs)

    def minimize(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        global_step: tf.Variable | None = None,
        var_list: Sequence[Variable] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tf.Operation | None:
        """`compute_gradients` and `apply_gradients` in one, of a `tf.compat.v1.train` optimizer.

        Args:
            loss: a tensor, or eagerly a function without arguments.
            global_step: an integer variable that 1 is added to, or None.
            var_list: variables, tables and others; None: all trainable ones, in a v1 graph only.
            *args, **kwargs: as in `tf.compat.v1.train.Optimizer.minimize`.
        """
        self._check_v1("minimize")
        name = kwargs.pop("name", None)
        pairs = self.compute_gradients(loss, var_list, *args, **kwargs)
        return self.apply_gradients(pairs, global_step, name)

    def _check_v1(self, method: str) -> None:
        if not isinstance(self._optimizer, tf.compat.v1.train.Optimizer):
            raise TypeError(
                f"{method}() is for tf.compat.v1.train optimizers. With {type(self._optimizer).__name__} of "
                f"{type(self._optimizer).__module__} take gradients from a tf.GradientTape and pass them to "
                "apply_gradients()."
            )

    def __repr__(self) -> str:
        return f"<sok.OptimizerWrapper of {type(self._optimizer).__module__}.{type(self._optimizer).__name__}>"


def _checked(optimizer: Any) -> Any:
    if not isinstance(optimizer, tuple(stock_bases().values())):
        raise TypeError(
            "`optimizer` must be an optimizer of Keras 3, tf_keras, tf_keras.optimizers.legacy or tf.compat.v1.train. "
            f"(Those of sok.optimizers train tables without a wrapper.) Received: {optimizer!r}."
        )
    _refuse_scaled_losses(optimizer)
    return optimizer


def _refuse_scaled_losses(optimizer: Any) -> None:
    # Keras 3 has a switch for it besides the class.
    if "LossScale" in type(optimizer).__name__ or getattr(optimizer, "loss_scale_factor", None):
        raise ValueError(
            f"sok.OptimizerWrapper cannot wrap {type(optimizer).__name__}: it scales losses, and would have to leave "
            "out the same steps of tables and dense variables on all workers. Compute in bfloat16, which needs no "
            "scaling (policy 'mixed_bfloat16'), or unscale the gradients yourself and wrap the inner optimizer."
        )


def _split(grads_and_vars: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs of tables, and those of other variables that have a gradient."""
    from sok.table.table import is_embedding_variable

    pairs = [(grad, variable) for grad, variable in grads_and_vars]
    tables = [pair for pair in pairs if is_embedding_variable(pair[1])]
    names = [variable.table_name for _, variable in tables]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"`grads_and_vars` must name each variable once: table '{name}' is there twice. Ask the tape for its "
                "gradient once; it covers all lookups."
            )
    return tables, [pair for pair in pairs if pair[0] is not None and not is_embedding_variable(pair[1])]


def _tables_optimizer(stock: Any) -> Optimizer:
    try:
        matched = _match(stock, share_iterations=False)
    except _NoMatch as reason:
        raise ValueError(
            f"sok.OptimizerWrapper cannot do to tables what {type(stock).__module__}.{type(stock).__name__} does: "
            f"{reason} Train the tables by one of sok.optimizers instead."
        ) from None
    rule = rules.find(matched.rule).lazy
    if not rule:
        return matched
    clipping = {"clipnorm": matched.clipnorm, "clipvalue": matched.clipvalue}
    lazy = of_rule(rule, matched._rate, matched._rule_config(), **clipping)
    # It goes on from the steps that the stock optimizer had done.
    lazy._adopt_iterations(matched.iterations)
    return lazy


def _is_v1_graph() -> bool:
    return not tf.compat.v1.executing_eagerly_outside_functions()
