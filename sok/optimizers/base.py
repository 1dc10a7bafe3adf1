"""What every optimizer of embedding tables shares: checks, counting steps, clipping, one native call per table."""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.base import names, strategies
from sok.base.types import Rate
from sok.job import context
from sok.job.job import job_of
from sok.job.transport.ordering import after_answers
from sok.optimizers import claims, gradients
from sok.optimizers.learning_rate import LearningRate, as_learning_rate, checked_number
from sok.optimizers.loss_scaling import follow_loss_scaler
from sok.table import rules
from sok.table import state as table_state

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable


_LAZY = "lazy_"  # the names of such rules begin with it
_BY_ROW = "_by_row"  # and end with it, if they count the steps of each row


class Optimizer(tf.__internal__.tracking.Trackable):
    """Changes the rows of embedding tables by their gradients; the base class of `sok.optimizers`.

    It is not a Keras optimizer and needs none. `apply_gradients` works in eager mode, inside `tf.function` and in a v1
    graph, there as an op to run. Gradients of duplicate row ids are summed before the rule runs, and each table is
    updated by one fused op on the rank that owns its rows. `sok.DistributedOptimizer` pairs such an optimizer with a
    stock one.

    Args:
        learning_rate: a number; a tf or Keras variable; a Keras 3 or tf_keras `LearningRateSchedule` or any function of
            the number of steps done; a function without arguments; in a v1 graph also a tensor or placeholder. A number
            is kept in a variable, so that setting `learning_rate` acts inside compiled functions too, except in a v1
            graph, where it becomes a constant. A function without arguments is called in eager mode at each step, but
            in a `tf.function` or graph only when that is traced: let it return a variable for its value to be followed.
        name: base of the name of this optimizer's slots; numbered if taken. The same on all ranks if they make
            their optimizers in the same order, which checkpoints and collectives rely on.
        clipnorm, clipvalue, global_clipnorm: as in Keras, at most one of them, of the gradient of the equivalent dense
            table: duplicates summed first, norms over all shards. `global_clipnorm` spans the tables given in one call.
        nonfinite_gradients: what happens to a row whose gradient has a NaN or an infinity. "allow": it is applied;
            "skip": the row is treated as if it were not in the batch: it is left as it is, but for `Adam`, whose rows
            decay in every step; "raise": `tf.errors.InvalidArgumentError` on every rank, naming table and key on the
            rank that has it, and no table is changed on any rank.

    With several ranks `clipnorm`, `global_clipnorm` and "raise" cost one small collective a step, together and for all
    tables.

    A `tf.train.Checkpoint` of the optimizer holds its `iterations` and, if it is a variable, its learning rate.
    Slots (moments, accumulators) live in the tables: `sok.save` and `sok.restore` keep them, and the two above.
    """

    # The name of its rule (sok.table.rules), set by each subclass, or by its constructor where arguments choose one of
    # `rules`. What it gives the constructor as `hyper` becomes its attributes.
    rule: str
    rules: tuple[str, ...] = ()

    # Of a rule of one's own, for files: where it is declared, and a hash of what it says.
    source: str | None = None

    def __init__(
        self,
        learning_rate: Rate,
        name: str | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        nonfinite_gradients: str = "allow",
        *,
        hyper: Mapping[str, float] | None = None,
    ) -> None:
        strategies.refuse(f"sok.optimizers.{type(self).__name__}", may_be_shared=True)
        self._take(hyper)
        if nonfinite_gradients not in gradients.NONFINITE_POLICIES:
            raise ValueError(
                f"`nonfinite_gradients` must be one of {gradients.NONFINITE_POLICIES}. "
                f"Received: {nonfinite_gradients!r}."
            )
        self.name = type(self).__name__ if name is None else _checked_name(name)
        self.nonfinite_gradients = nonfinite_gradients
        self._clipping = gradients.Clipping(clipnorm, clipvalue, global_clipnorm)
        self._rate = as_learning_rate(learning_rate)
        # Outside functions: those hold a step of an optimizer, not the optimizer.
        with tf.init_scope(), tf.device(context.variables_device()):
            graph = _v1_graph()
            self._graph = None if graph is None else weakref.ref(graph)
            self._slot_set = names.unique("optimizer", self.name)
            self._iterations = tf.compat.v1.Variable(
                0, dtype=tf.int64, trainable=False, use_resource=True, name=f"{self._slot_set}/iterations"
            )
        self._track_trackable(self._iterations, "iterations")
        if self._rate.trackable is not None:
            self._track_trackable(self._rate.trackable, "learning_rate")

    # What its rule says.

    def _take(self, hyper: Mapping[str, float] | None) -> None:
        if hyper is None:
            return
        rule = rules.find(self.rule)
        names = [one.name for one in rule.hyper]
        if set(names) != set(hyper):
            raise ValueError(
                f"Rule '{self.rule}' takes {names} beside the learning rate. Received: {list(hyper)}. A rule of your "
                "own must be registered first: sok.table.rules.register."
            )
        for one in rule.hyper:
            setattr(self, one.name, one.check(one.name, hyper[one.name]))
        error = rule.error(self._rule_config())
        if error:
            raise ValueError(error)

    @classmethod
    def _options_of(cls, rule: str) -> dict[str, Any]:
        """The arguments, beside the hyperparameters, by which the constructor chooses this one of its rules."""
        by_row = {"bias_correction": "row"} if rule.endswith(_BY_ROW) else {}
        return {"lazy": rule.startswith(_LAZY), **by_row} if cls.rules else {}

    def _choose(self, rule: str, lazy: bool, bias_correction: str = "step") -> None:
        if lazy not in (False, True):
            raise ValueError(f"`lazy` must be True or False. Received: {lazy!r}.")
        if bias_correction not in ("step", "row"):
            raise ValueError(f"`bias_correction` must be 'step' or 'row'. Received: {bias_correction!r}.")
        self.rule = (_LAZY + rule if lazy else rule) + (_BY_ROW if bias_correction == "row" else "")
        if bias_correction == "row" and self.rule not in rules.RULES:
            raise ValueError(
                f"{type(self).__name__} counts the steps of each row (bias_correction='row') if it is lazy and not "
                f"amsgrad. Received: lazy={lazy}, rule {rule!r}."
            )

    @property
    def lazy(self) -> bool:
        """Whether rows outside the batch stay as they are, where a dense table's would change."""
        return self.rule.startswith(_LAZY)

    def _rule_config(self) -> dict[str, float]:
        """The hyperparameters beside the learning rate, in the order in which the native rule takes them."""
        return {one.name: getattr(self, one.name) for one in rules.find(self.rule).hyper}

    # State.

    @property
    def learning_rate(self) -> Any:
        """The variable, tensor or (in a v1 graph) number; for a schedule or function, its value now.

        Set it to a number at any time; or to anything else that the constructor accepts, which functions compiled
        before do not see.
        """
        return self._rate.visible(self._iterations)

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        try:
            number = checked_number(value)
        except TypeError:
            self._rate = as_learning_rate(value)
            if self._rate.trackable is not None:
                self._track_trackable(self._rate.trackable, "learning_rate", overwrite=True)
            return
        self._rate.assign(number)

    @property
    def iterations(self) -> tf.Variable:
        """Number of `apply_gradients` calls so far: int64 []."""
        return self._iterations

    @property
    def slot_set(self) -> str:
        """The name under which tables keep this optimizer's slots."""
        return self._slot_set

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots that tables keep for each row, scalars behind the others."""
        return rules.find(self.rule).slot_names

    @property
    def slot_inits(self) -> tuple[float, ...]:
        """The initial value of each slot."""
        starts = [slot.start for slot in rules.find(self.rule).slots]
        return tuple(getattr(self, start) if isinstance(start, str) else start for start in starts)

    # Without get_slot_names: TensorFlow's checkpoints would take slots for variables.
    def get_slot(self, var: EmbeddingVariable, name: str) -> tf.Tensor:
        """One slot of the rows that this worker holds of a table, in the order of `var.export()`: [n, D], of a scalar
        [n, 1]. Eager only.

        Raises:
            TypeError: `var` is no embedding variable.
            ValueError: the optimizer has no such slot.
        """
        _check_variable(var)
        if name not in self.slot_names:
            raise ValueError(f"`name` must be one of {list(self.slot_names)}. Received: {name!r}.")
        number, widths = self.slot_names.index(name), rules.find(self.rule).slot_widths(var.local_dim)
        if self._slot_set not in {found.name for found in table_state.slot_sets(var)}:
            return tf.fill([tf.size(var.export()[0]), widths[number]], self.slot_inits[number])
        return tf.split(var.slots(self._slot_set)[1], widths, axis=1)[number]

    @property
    def _slots(self) -> dict[str, dict[str, tf.Tensor]]:
        # As optimizers of TF 1 have it, whose slots scripts read: by the name of the slot, and by variable. A graph has
        # none, since it does not know yet which rows there will be.
        trained = claims.tables_of(self) if tf.executing_eagerly() else []
        return {name: {table._unique_id: self.get_slot(table, name) for table in trained} for name in self.slot_names}

    @property
    def initializer(self) -> tf.Operation | None:
        """In a v1 graph the op that initialises the `variables` that are tf.Variables; eagerly None: they are."""
        if self._graph is None:
            return None
        return tf.group(*[variable.initializer for variable in self.variables])

    @property
    def clipnorm(self) -> float | None:
        return self._clipping.clipnorm

    @property
    def clipvalue(self) -> float | None:
        return self._clipping.clipvalue

    @property
    def global_clipnorm(self) -> float | None:
        return self._clipping.global_clipnorm

    @property
    def variables(self) -> list[Any]:
        """The step counter, and the learning rate if it is a variable. Slots are in the tables, not here."""
        rate = self._rate.trackable
        return [self._iterations] if rate is None else [self._iterations, rate]

    def build(self, variables: Sequence[Any]) -> None:
        """Checks that all `variables` are embedding variables; the first step makes the slots."""
        follow_loss_scaler()
        for variable in variables:
            _check_variable(variable)
            claims.claim(self, variable)

    # Steps.

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        """`apply_gradients`, as the `LossScaleOptimizer` of Keras 3 calls it."""
        self.apply_gradients(zip(grads, trainable_variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        gradient_scale: float | tf.Tensor | None = None,
        experimental_aggregate_gradients: bool | None = None,
    ) -> tf.Operation | None:
        """Runs one step of the optimizer on the tables given. Collective if it clips norms or raises (see the class).

        Args:
            grads_and_vars: pairs (`tf.IndexedSlices` with local row ids, `EmbeddingVariable`), as `tape.gradient` gives
                them. Each counts a `step` of its table. Where the gradient is None that is all; slices without rows are
                an update, which under `Adam` decays every row.
            name: name scope of the ops.
            gradient_scale: a number or scalar tensor that gradients are multiplied with, before they are clipped.
            experimental_aggregate_gradients: accepted because scripts for SOK v1 pass it; it has no effect.

        Returns:
            In a v1 graph, the op that does the step; None in eager mode and inside a `tf.function`, where it is done.

        Raises:
            TypeError: a variable that is not an embedding variable, or a gradient that is not `tf.IndexedSlices`.
            ValueError: the same variable twice.
            RuntimeError: the optimizer belongs to another graph.
            tf.errors.InvalidArgumentError: see `nonfinite_gradients`; nothing is counted then.
        """
        return self._apply(_checked_pairs(grads_and_vars), name, gradient_scale)

    def _apply(
        self,
        pairs: list[tuple[Any, Any]],
        name: str | None = None,
        gradient_scale: float | tf.Tensor | None = None,
        counts_step: bool = True,
    ) -> tf.Operation | None:
        strategies.refuse(f"sok.optimizers.{type(self).__name__}", may_be_shared=True)
        self._check_graph()
        tables = [variable for _, variable in pairs]
        if tables:
            job_of(tables)
        given = [pair for pair in pairs if pair[0] is not None]

        def with_all(slices: list[Any]) -> None:
            found = iter(slices)
            of_all = [(grad if grad is None else next(found), variable) for grad, variable in pairs]
            self._apply(of_all, name, gradient_scale, counts_step)

        if strategies.once_for_all(with_all, [grad for grad, _ in given]):
            return None
        pairs = given
        for _, variable in pairs:
            claims.claim(self, variable)
        in_order = contextlib.nullcontext() if tables and tables[0].on_servers else after_answers()
        with tf.name_scope(name or self.name), in_order:
            ready, guards = gradients.prepare(
                [
                    gradients.with_penalty(gradients.from_slices(grad, variable, gradient_scale))
                    for grad, variable in pairs
                ],
                self._clipping,
                self.nonfinite_gradients,
                self._slot_set,
            )
            with tf.device("CPU:0"):  # kernels take these there: from a GPU each would be waited for
                done = tf.convert_to_tensor(self._iterations)
                step = tf.cast(done, tf.int64) + 1
                values = [float(value) for value in self._rule_config().values()]
                hyper = tf.concat([[self._rate.at(done)], tf.constant(values, tf.float64)], 0)
            with tf.control_dependencies([guard for guard in guards if guard is not None]):
                updates = self._update_all(ready, step, hyper)
            with tf.control_dependencies([op for op in updates if op is not None]):
                updates += gradients.constrain(ready)
            # After the updates: in a v1 graph nothing else keeps them from reading the next step's number.
            with tf.control_dependencies([op for op in updates if op is not None] + [step, hyper]):
                updates.append(table_state.count_step(tables))
                if counts_step:
                    updates.append(self._count_step())
            # A function runs all that is in it, and cannot return an op.
            return tf.group(*[op for op in updates if op is not None]) if _is_v1_graph() else None

    def _update_all(self, ready: list[gradients.TableGradient], step: tf.Tensor, hyper: tf.Tensor) -> list[Any]:
        """One op, and one more for each penalty that shrinks all rows of tables."""
        exact = [g for g in ready if g.variable.row_terms and g.variable.row_terms.is_exact]
        if not exact:
            return [self._update(ready, step, hyper)] if ready else []
        if self.rule != "sgd" or self._clipping.is_active:
            raise ValueError(
                f"Table '{exact[0].variable.table_name}' has regularize='exact', for which its optimizer must be plain "
                "SGD, without momentum, weight decay and clipping: rows outside the batch then shrink in each step by "
                f"one factor. Received: {self!r}. Use regularize='batch'."
            )
        of_penalty: dict[float, list[gradients.TableGradient]] = {}
        for g in exact:
            of_penalty.setdefault(g.variable.row_terms.l2, []).append(g)
        others = [g for g in ready if all(g is not one for one in exact)]
        updates = [self._update(others, step, hyper)] if others else []
        for l2, tables in of_penalty.items():
            # The gradient of l2 |w|^2 is 2 l2 w. No momentum, and none of Nesterov's.
            with tf.device("CPU:0"):
                decay = tf.concat([hyper, [0.0, 0.0, 2.0 * l2]], 0)
            updates.append(gradients.apply(tables, step, decay, "sgdw", self._slot_set, self.nonfinite_gradients))
        return updates

    def _update(self, ready: list[gradients.TableGradient], step: tf.Tensor, hyper: tf.Tensor) -> Any:
        return gradients.apply(ready, step, hyper, self.rule, self._slot_set, self.nonfinite_gradients)

    def _count_step(self) -> Any:
        with tf.device("CPU:0"):
            added = self._iterations.assign_add(1)
        return None if tf.executing_eagerly() else tf.convert_to_tensor(added).op

    def _adopt_iterations(self, variable: Any) -> None:
        """Counts in another optimizer's variable from now on."""
        self._iterations = variable
        self._track_trackable(variable, "iterations", overwrite=True)

    def _check_graph(self) -> None:
        with tf.init_scope():
            now = _v1_graph()
        is_home = now is None if self._graph is None else now is not None and now is self._graph()
        if not is_home:
            made = "in eager mode" if self._graph is None else "in a v1 graph"
            used = "in eager mode" if now is None else "in a v1 graph" if self._graph is None else "in another one"
            raise RuntimeError(
                f"Optimizer '{self._slot_set}' was made {made} and is used {used}, where its step counter does not "
                "exist. Make the optimizer where it is used."
            )

    # Reading and writing its settings.

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, as `from_config` takes them. State is not in it.

        Raises:
            TypeError: the learning rate is a function or tensor, which cannot be written down.
        """
        return {
            "name": self.name,
            "learning_rate": self._rate.config(),
            **self._rule_config(),
            **self._options_of(self.rule),
            "clipnorm": self.clipnorm,
            "clipvalue": self.clipvalue,
            "global_clipnorm": self.global_clipnorm,
            "nonfinite_gradients": self.nonfinite_gradients,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Optimizer:
        """Makes an optimizer from what `get_config` gave."""
        return cls(**config)

    def __repr__(self) -> str:
        settings = {"learning_rate": _shown(self._rate), **self._rule_config()}
        settings |= {k: getattr(self, k) for k in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(self, k)}
        if self.nonfinite_gradients != "allow":
            settings["nonfinite_gradients"] = repr(self.nonfinite_gradients)
        shown = ", ".join(f"{key}={value}" for key, value in settings.items())
        return f"<sok.optimizers.{type(self).__name__} '{self._slot_set}': {shown}>"


def _v1_graph() -> tf.Graph | None:
    """The v1 graph that is being built, or None when executing eagerly. Call it in an init_scope."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _is_v1_graph() -> bool:
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def _checked_name(name: Any) -> str:
    # What TensorFlow takes as a name scope.
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*", name):
        raise ValueError(
            "`name` must be None or a string of letters, digits and ._/>- that starts with a letter or digit. "
            f"Received: {name!r}."
        )
    return name


def _shown(rate: LearningRate) -> str:
    try:
        config = rate.config()
    except TypeError:
        return rate.describe()
    return f"{config:g}" if isinstance(config, float) else rate.describe()


def _check_variable(variable: Any) -> None:
    from sok.table.table import is_embedding_variable

    if not is_embedding_variable(variable):
        raise TypeError(
            "sok.optimizers update embedding variables only: divide the variables with "
            "sok.split_embedding_variable_from_others(variables) and give the others to a stock optimizer, or let "
            "sok.DistributedOptimizer(stock_optimizer) do both. "
            f"Received: {getattr(variable, 'name', variable)!r} of type {type(variable).__name__}."
        )


def _checked_pairs(grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The pairs, each variable once."""
    pairs: list[Any] = [tuple(pair) for pair in grads_and_vars]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"`grads_and_vars` must hold pairs (gradient, variable). Received: {pair!r}.")
        _check_variable(pair[1])
    seen: set[int] = set()
    for _, variable in pairs:
        if id(variable) in seen:
            raise ValueError(
                f"`grads_and_vars` must name each variable once: table '{variable.table_name}' is there twice. "
                "Ask the tape for its gradient once; it covers all lookups."
            )
        seen.add(id(variable))
    if pairs and all(grad is None for grad, _ in pairs):
        warnings.warn(
            "None of the embedding variables given to apply_gradients has a gradient: "
            f"{[variable.table_name for _, variable in pairs]}. Were they looked up under the tape?",
            stacklevel=3,
        )
    return pairs
