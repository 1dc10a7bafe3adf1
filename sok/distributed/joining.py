"""A worker whose `fit` has no more batches in an epoch takes part in the steps of the others, with no ids.

It runs no model. Of its last step it knows which lookups were made and which gradients there were: that is enough to
make the same collectives, serve the rows that it owns, and update them and its replicas as the others do. Keras tells
nobody between the last batch of an epoch and its validation; a callback is the first that hears of either.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from sok.base import keras_calls
from sok.base.keras_callback import Callback
from sok.base.types import KerasModel, StockOptimizer
from sok.distributed.loss_scale import share_of_mean
from sok.job import agreement, context, meeting
from sok.lookup import lookup
from sok.lookup.begun import Ticket, finishing
from sok.lookup.feature import ROWS, Csr, Feature

if TYPE_CHECKING:
    from sok.distributed.tables import TableTrainer


@dataclasses.dataclass(frozen=True)
class _Noted:
    """A lookup of a step; its features have no ids."""

    features: list[Feature]
    insert: bool
    sent: Any
    graph: Any  # weakly, the function in which it was built; None: eagerly


@dataclasses.dataclass(frozen=True)
class _Step:
    """What a step of a worker with a batch does together with others."""

    # Of features without ids, whether keys get rows, and whether it has begun before.
    lookups: list[tuple[list[Feature], bool, bool]]
    gradients: list[int]  # the lookups of which there is one, in the order in which it is taken
    tables: list[Any]  # that get a gradient
    others: list[tuple[Any, type | None]]  # ordinary variables, and of which kind theirs is
    shares_samples: bool  # whether workers tell each other how many they have


_noted: list[_Noted] = []
_gradients: list[Any] = []  # those that were sent of the lookups whose gradients were taken
# Of each TableTrainer, by whether lookups of its `fit` begin ahead; why nobody can join it, where a lookup lies in a
# function that nobody sees a second time.
_steps: weakref.WeakKeyDictionary[Any, dict[bool, _Step | str]] = weakref.WeakKeyDictionary()


def _graph(graph: Any = None) -> Any:
    if tf.executing_eagerly():
        return None
    return weakref.ref(tf.compat.v1.get_default_graph() if graph is None else graph)


def _graph_of_step() -> Any:
    """As `_graph` of the lookups: a loss scale decides in it, in a branch, whether gradients are applied."""
    is_branch = keras_calls.loss_scaler() is not None and not tf.executing_eagerly()
    graph: Any = tf.compat.v1.get_default_graph()
    return _graph(graph.outer_graph if is_branch and isinstance(graph, ControlFlowFuncGraph) else graph)


def _note_lookup(features: Sequence[Feature], insert: tf.Tensor, sent: Any) -> None:
    if keras_calls.model_that_trains() is None:
        return
    known = tf.get_static_value(insert)
    without = [dataclasses.replace(f, ids=None, seen=None) for f in features]
    _noted.append(_Noted(without, True if known is None else bool(known), sent, _graph()))


def _note_gradient(sent: Any) -> None:
    if any(one.sent is sent for one in _noted):
        _gradients.append(sent)


lookup.note_with(_note_lookup, _note_gradient)


def num_samples(batch: Any) -> tf.Tensor | None:
    """The number of samples of a batch, float32 []; None if there is no batch."""
    first = next((part for part in tf.nest.flatten(batch) if part is not None), None)
    if first is None:
        return None
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.float32)
    count = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
    return tf.cast(count, tf.float32)


def forget_step() -> None:
    """Forgets the lookups of a step that nobody joins: its strategy gives all workers as many batches."""
    _noted.clear()
    _gradients.clear()


def note_step(trainer: TableTrainer, of_tables: Sequence[Any], others: Sequence[Any]) -> None:
    """Remembers the step that is made, or built, and looks whether workers of this `fit` have as many batches.

    Collective in the first step of a `fit`, if none has been before: one.

    Raises:
        ValueError: they have not, and cannot join a step like this one.
    """
    lookups, gradients = list(_noted), list(_gradients)
    _noted.clear()
    _gradients.clear()
    if context.size() == 1 or keras_calls.model_that_trains() is None:
        return
    tables = [table for grad, table in of_tables if grad is not None]
    fit = keras_calls.fit_that_runs()
    steps, is_ahead = _steps.setdefault(trainer, {}), _ahead_of(fit) is not None
    graph = _graph_of_step()
    reason = _why_not(lookups, tables, graph)
    if isinstance(steps.get(is_ahead), str):
        pass  # one of its functions is as it was
    elif reason is not None:
        steps[is_ahead] = reason
        if (ahead := _ahead_of(fit)) is not None:
            ahead.reading.refuse_to_join(reason)
    else:
        steps[is_ahead] = _Step(
            [(one.features, one.insert, one.sent.is_ahead) for one in lookups],
            [i for sent in gradients for i, one in enumerate(lookups) if one.sent is sent],
            tables,
            [(v, None if grad is None else type(grad)) for grad, v in others],
            trainer.shares_samples,
        )
    if fit is None or trainer_of(fit[0].optimizer) is not trainer:
        return
    meeting = _begin(*fit, calls=1)
    meeting.check()


def _why_not(lookups: Sequence[_Noted], tables: Sequence[Any], graph: Any) -> str | None:
    """Why a worker without a batch cannot join a step; None if it can."""
    if any(one.graph != graph for one in lookups):
        return "a lookup of the step lies in a tf.function, a loop or a branch of its own"
    known = {id(f.table) for one in lookups for f in one.features}
    if any(id(table) not in known for table in tables):
        return "a lookup of the step lies in a tf.function that was traced before"
    return None


def trainer_of(optimizer: StockOptimizer) -> Any:
    """The `TableTrainer` of one of our optimizers, or of that in a `LossScaleOptimizer`; None of another."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), "_tables", None)


class _Meeting:
    """The function with which Keras makes a step: before the first of each `fit` workers look who has how many."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fit = keras_calls.fit_that_runs()
        if fit is not None and trainer_of(fit[0].optimizer) is not None:
            args = _begin(*fit).before_call(args)
        return self._step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in vars(self):
            raise AttributeError(name)
        return getattr(self._step, name)


def begin_fit(model: KerasModel) -> None:
    """To be called where Keras' `fit` has made its function, before its first step: also by workers without a batch.

    Raises:
        ValueError: Horovod's MetricAverageCallback, where it would fail after the first epoch.

    Collective in `fit` with one of our optimizers: one.
    """
    fit = keras_calls.fit_that_runs()
    if fit is None or fit[0] is not model or trainer_of(model.optimizer) is None:
        return
    _refuse_average_of_horovod(fit[1])
    if context.size() > 1:
        _begin(*fit)


def _refuse_average_of_horovod(callbacks: Sequence[Any]) -> None:
    theirs = getattr(sys.modules.get("horovod._keras.callbacks"), "MetricAverageCallbackImpl", ())
    for callback in callbacks:
        # It has Keras 3's backend, whatever Keras the model is of, and wants what tf_keras' has.
        if isinstance(callback, theirs) and not hasattr(callback.backend, "constant"):
            raise ValueError(
                f"Horovod's {type(callback).__name__} fails with this Keras, after the first epoch. Take "
                "sok.callbacks.MetricSumCallback(), which is exact, or sok.callbacks.MetricAverageCallback()."
            )


def _begin(model: Any, callbacks: list[Any], calls: int = 0) -> _Joining:
    """The callback of a `fit` that has it join, which is made by the first that asks."""
    if not isinstance(getattr(model, "train_function", None), _Meeting) and model.train_function is not None:
        model.train_function = _Meeting(model.train_function)
    joining = next((callback for callback in callbacks if isinstance(callback, _Joining)), None)
    if joining is None:
        _refuse_average_of_horovod(callbacks)
        batches = keras_calls.batches_of_fit()
        at_once: Any = getattr(model, "_steps_per_execution", None)  # tf_keras' variable
        with tf.init_scope():
            at_once = getattr(model, "steps_per_execution", 1) if at_once is None else at_once.numpy()
            said = meeting.together("sok/fit", lambda: [batches, keras_calls.steps_asked()])
        batches_of_all, steps_of_all = map(list, zip(*said, strict=True))
        joining = _Joining(model, batches_of_all, steps_of_all, int(at_once or 1), calls)
        callbacks.insert(0, joining)
        callbacks.append(_Agreeing(model))
    return joining


class Reading(Protocol):
    """How a `fit` reads data whose lookups begin ahead."""

    has_begun: bool

    def next(self) -> Ticket | None:
        """The ticket of the next batch, which Keras has not taken; None: no worker has one."""

    def stop(self) -> None:
        """What has not begun is left out."""

    def refuse_to_join(self, why: str) -> None:
        """From the next batch on that not all workers have, all raise."""


class _Ahead(Callback):
    """In a `fit` whose lookups begin before their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[Reading] = []  # the last two: Keras 3 begins the next where an epoch ends

    @property
    def reading(self) -> Reading:
        """That of the epoch."""
        return next(one for one in reversed(self.readings) if one.has_begun or one is self.readings[0])


def note_ahead(reading: Reading) -> None:
    """To be called where `fit` begins to read data whose lookups begin ahead."""
    fit = keras_calls.fit_that_runs()
    if fit is None or context.size() == 1:
        return
    ahead = _ahead_of(fit)
    if ahead is None:
        fit[1].append(ahead := _Ahead())
    ahead.readings = [*ahead.readings[-1:], reading]


def _ahead_of(fit: tuple[Any, list[Any]] | None) -> _Ahead | None:
    """That of a `fit`, as `fit_that_runs` gives it, if its lookups begin ahead."""
    return next((callback for callback in (fit[1] if fit else ()) if isinstance(callback, _Ahead)), None)


class _Agreeing(Callback):
    """After all other callbacks: where one has stopped the `fit` of a worker, all stop."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        said = meeting.together("sok/fit/stop", lambda: bool(self._model.stop_training))
        self._model.stop_training = any(said)


class _Joining(Callback):
    """After the last batch of an epoch: takes part in the steps of workers that have more, until none has.

    Args:
        model: that is trained.
        batches: how many each worker has in an epoch; None: Keras does not know.
        steps: the `steps_per_epoch` of each worker.
        at_once: steps of a call of this worker's function.
        calls: of it that have been made.
    """

    def __init__(
        self, model: Any, batches: list[int | None], steps: list[int | None], at_once: int, calls: int
    ) -> None:
        super().__init__()
        self._steps_of_all = steps
        self._model, self._trainer = model, trainer_of(model.optimizer)
        self._batches, self._at_once, self._calls = batches, at_once, calls
        self._is_even = None not in batches and len(set(batches)) == 1
        self._is_done = False
        self._function: Any = None
        self._made_of: _Step | None = None
        self._others_step = tf.Variable(True, trainable=False)

    def check(self) -> None:
        """ValueError where workers have other numbers of batches, and cannot join: on all of them."""
        reason = self._noted_step()
        if isinstance(reason, str) and None not in self._batches and not self._is_even:
            raise ValueError(_refusal(reason, self._batches))

    def before_call(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the function is to be called with instead of `args`, in which the batches lie."""
        _noted.clear()  # of a step that has failed
        _gradients.clear()
        if len(set(self._steps_of_all)) > 1 and _ahead_of(keras_calls.fit_that_runs()) is not None:
            raise ValueError(
                "With sok.prefetch all workers give `fit` one `steps_per_epoch`: what one has begun and does not train "
                f"would be lost. Received, by rank: {self._steps_of_all}."
            )
        if self._asks():
            args = self._ask(*args)
        self._calls += 1
        return args

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._is_done = False

    def on_test_begin(self, logs: Any = None) -> None:
        self._join()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._join()

    def _join(self) -> None:
        if self._is_done:
            return
        self._is_done = True  # until the next epoch
        step, made = self._noted_step(), self._calls * self._at_once
        if (ahead := _ahead_of(keras_calls.fit_that_runs())) is not None and self._model.stop_training:
            ahead.reading.stop()
        if self._is_even:
            left = (self._batches[0] or 0) - made
            if left > 0 and not isinstance(step, _Step):
                raise ValueError(
                    f"This worker's `fit` was stopped after {made} of {self._batches[0]} batches, and it cannot take "
                    f"part in the last steps of the others: {step}. Stop after the last batch of an epoch."
                )
            for _ in range(left):
                self._step(step)
        elif isinstance(step, _Step):
            while self._step(step):
                pass
        elif step is None:
            raise ValueError(
                "This worker has had no batch, and so cannot take part in the steps of the others. Give each worker "
                "one at least, or call `fit` without run_eagerly for a model that sok.distributed_model has converted."
            )
        elif self._asks():
            self._tell(0)
        self._calls = 0

    def _noted_step(self) -> _Step | str | None:
        is_ahead = _ahead_of(keras_calls.fit_that_runs()) is not None
        return _steps.get(self._trainer, {}).get(is_ahead)

    def _asks(self) -> bool:
        """Whether workers cannot join and nobody knows how many batches there are: they then ask before each call."""
        cannot_join = isinstance(_steps.get(self._trainer, {}).get(False), str) and None in self._batches
        return cannot_join and _ahead_of(keras_calls.fit_that_runs()) is None  # last: it is asked before each call

    def _ask(self, iterator: Any) -> tuple[Any, ...]:
        """An iterator over the batches of one call, if all workers have as many; `iterator` has them no more."""
        taken: list[Any] = []
        for batch in itertools.islice(iterator, self._at_once):
            one = tf.data.Dataset.from_tensors(batch)
            taken.append(one if not taken else taken[-1].concatenate(one))
        if not taken:
            raise tf.errors.OutOfRangeError(None, None, "There are no more batches.")
        self._tell(len(taken))
        variant = tf.data.experimental.to_variant(taken[-1])
        return (iter(tf.data.experimental.from_variant(variant, iterator.element_spec)),)

    def _tell(self, batches: int) -> None:
        said = agreement.together(
            context.get_transport(), "sok/fit/batches", lambda: [batches, batches + self._calls * self._at_once]
        )
        if len({now for now, _ in said}) > 1:
            raise ValueError(_refusal(str(self._noted_step()), [None if now else made for now, made in said]))

    def _step(self, step: Any) -> bool:
        """Takes part in a step of the others; whether there was, or may have been, one."""
        ahead, begun = _ahead_of(keras_calls.fit_that_runs()), []
        if ahead is not None:
            ticket = ahead.reading.next()
            if ticket is None:
                return False
            begun = [ticket]
        if self._made_of is not step:
            join, eagerly = _joined_step(self._model.optimizer, step, self._others_step), self._model.run_eagerly
            if begun:
                join = finishing(begun[0], join, eagerly)
            elif not eagerly:
                join = tf.function(join, autograph=False)
            self._made_of, self._function = step, join
        return bool(self._function(*begun)) or ahead is not None


def _refusal(reason: str, batches: Sequence[int | None]) -> str:
    numbers = ", ".join(f"{'more' if one is None else one} on rank {rank}" for rank, one in enumerate(batches))
    return (
        f"The workers of this `fit` have unequal numbers of batches in an epoch ({numbers}), and those that have fewer "
        f"cannot take part in the steps of the others: {reason}. Give all as many: sok.data.batches, or one "
        "steps_per_epoch for all."
    )


def _joined_step(optimizer: Any, step: _Step, others_step: tf.Variable) -> Any:
    """A step of a worker without a batch: the same collectives as with one, and the same changes."""
    trainer = trainer_of(optimizer)

    def join(begun: Sequence[lookup.Ticket] = ()) -> tf.Tensor:
        lookups, tickets = [], iter(begun)
        for features, insert, is_ahead in step.lookups:
            with tf.GradientTape() as tape:
                ticket = next(tickets) if is_ahead else lookup.begin([_empty(f) for f in features], insert)
                found = lookup.finish(ticket)
                lookups.append((tape, tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in found])))
        shared = [share_of_mean(tf.constant(0.0))] if step.shares_samples else []
        with tf.control_dependencies(shared):
            # One by one, for they are taken in one order on all workers. Ids that have begun train nothing.
            nothing = tf.zeros([])
            gradients = [lookups[i][0].gradient(lookups[i][1], step.tables, nothing) for i in step.gradients]
        pairs: list[Any] = []
        for parts, table in zip(zip(*gradients, strict=True), step.tables, strict=False):
            slices = [part for part in parts if part is not None]
            values, indices = (tf.concat([getattr(part, name) for part in slices], 0) for name in ("values", "indices"))
            pairs.append((tf.IndexedSlices(values, indices), table))
        if hasattr(optimizer, "get_unscaled_gradients"):  # tf_keras does so where it takes gradients
            pairs = list(zip(optimizer.get_unscaled_gradients([g for g, _ in pairs]), step.tables, strict=True))
        pairs += [(_nothing(v, kind), v) for v, kind in step.others]
        # A loss scale may leave the step out: then there was one.
        others_step.assign(True)
        trainer.joins = others_step
        try:
            optimizer.apply_gradients(pairs)
        finally:
            trainer.joins = None
        return others_step.read_value()

    return join


def _nothing(variable: Any, kind: type | None) -> Any:
    """A gradient of a worker that has no samples."""
    if kind is None:
        return None
    if not issubclass(kind, tf.IndexedSlices):
        return tf.zeros(variable.shape, variable.dtype)
    return tf.IndexedSlices(tf.zeros([0, *variable.shape[1:]], variable.dtype), tf.zeros([0], tf.int64))


def _empty(f: Feature) -> Feature:
    keys = tf.zeros([0], f.key_dtype)
    # As many segments as a sample has features, or none.
    splits = None if f.combiner == ROWS else tf.zeros([1], tf.int64)
    return dataclasses.replace(f, ids=Csr(keys, row_splits=splits))
