"""A worker whose `fit` has no more batches in an epoch takes part in the steps of the others, with no ids.

It runs no model. Of its last step it knows which lookups were made and which gradients there were: that is enough to
make the same collectives, serve the rows that it owns, and update them and its replicas as the others do. Keras tells
nobody between the last batch of an epoch and its validation; a callback is the first that hears of either.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.base import keras_calls
from sok.base.keras_callback import Callback
from sok.distributed import reduction
from sok.job import agreement, context
from sok.lookup import lookup
from sok.lookup.feature import ROWS, Csr, Feature

if TYPE_CHECKING:
    from sok.distributed.tables import TableTrainer


@dataclasses.dataclass(frozen=True)
class _Noted:
    """A lookup of a step; its features have no ids."""

    features: list[Feature]
    insert: bool
    sent: Any
    graph: Any  # weakly, the function in which it was built


@dataclasses.dataclass(frozen=True)
class _Step:
    """What a step of a worker with a batch does together with others."""

    lookups: list[tuple[list[Feature], bool]]  # of features without ids, and whether keys get rows
    gradients: list[int]  # the lookups of which there is one, in the order in which it is taken
    tables: list[Any]  # that get a gradient
    others: list[tuple[Any, bool]]  # ordinary variables, and whether they get one


_noted: list[_Noted] = []
_gradients: list[Any] = []  # those that were sent of the lookups whose gradients were taken
# Of each TableTrainer; None where a lookup lies in a function of its own, in which nobody sees it a second time.
_steps: weakref.WeakKeyDictionary[Any, _Step | None] = weakref.WeakKeyDictionary()


def _graph() -> Any:
    return weakref.ref(tf.compat.v1.get_default_graph())


def _note_lookup(features: Sequence[Feature], insert: tf.Tensor, sent: Any) -> None:
    if tf.executing_eagerly() or keras_calls.model_that_trains() is None:
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


def note_step(trainer: TableTrainer, of_tables: Sequence[Any], others: Sequence[Any]) -> None:
    """Remembers the step that is made, or built, and looks whether workers of this `fit` have as many batches.

    Collective in the first step of a `fit`: one.
    """
    lookups, gradients = list(_noted), list(_gradients)
    _noted.clear()
    _gradients.clear()
    # Eagerly Keras' tape says in which order gradients meet, and a worker that runs no model cannot know it.
    if context.size() == 1 or tf.executing_eagerly() or keras_calls.model_that_trains() is None:
        return
    graph = _graph()
    tables = [table for grad, table in of_tables if grad is not None]
    mine = [one for one in lookups if one.graph == graph]
    if len(mine) < len(lookups):
        _steps[trainer] = None
    elif _steps.get(trainer, mine) is not None:
        _steps[trainer] = _Step(
            [(one.features, one.insert) for one in mine],
            [i for sent in gradients for i, one in enumerate(mine) if one.sent is sent],
            tables,
            [(v, grad is not None) for grad, v in others],
        )
    fit = keras_calls.fit_that_runs()
    if fit is None or getattr(fit[0].optimizer, "_tables", None) is not trainer:
        return
    model, callbacks = fit
    _meet(model, callbacks)
    if not isinstance(getattr(model, "train_function", None), _Meeting) and model.train_function is not None:
        model.train_function = _Meeting(model.train_function)


class _Meeting:
    """The function with which Keras makes a step; the first of each `fit` looks whether workers have as many."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fit = keras_calls.fit_that_runs()
        if fit is not None and hasattr(fit[0].optimizer, "_tables"):
            _meet(*fit)
        return self._step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in vars(self):
            raise AttributeError(name)
        return getattr(self._step, name)


def _meet(model: Any, callbacks: list[Any]) -> None:
    if any(isinstance(callback, _Joining) for callback in callbacks):
        return
    batches = keras_calls.batches_of_fit()
    with tf.init_scope():
        at_once: Any = getattr(model, "_steps_per_execution", None)  # tf_keras' variable
        at_once = getattr(model, "steps_per_execution", 1) if at_once is None else at_once.numpy()
        at_once = int(at_once or 1)
        said = agreement.together(context.get_transport(), "sok/fit", lambda: [batches, at_once])
    is_even = batches is not None and all(one == said[0] for one in said)
    joins = not is_even and all(steps == 1 for _, steps in said) and _steps.get(model.optimizer._tables) is not None
    callbacks.insert(0, _Joining(model.optimizer, joins))


class _Joining(Callback):
    """After the last batch of an epoch: takes part in the steps of workers that have more, until none has."""

    def __init__(self, optimizer: Any, joins: bool) -> None:
        super().__init__()
        self._optimizer, self._joins = optimizer, joins
        self._is_done = False
        self._functions: tuple[Any, Any] | None = None
        self._made_of: _Step | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._is_done = False

    def on_test_begin(self, logs: Any = None) -> None:
        self._join()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._join()

    def _join(self) -> None:
        if not self._joins or self._is_done:
            return
        self._is_done = True
        step = _steps[self._optimizer._tables]
        if step is None:  # known only since the last `fit` began
            return
        if self._made_of is not step:
            made = _exchange(self._optimizer._tables, step), _update(self._optimizer, step)
            self._functions = tf.function(made[0], autograph=False), tf.function(made[1], autograph=False)
            self._made_of = step
        assert self._functions is not None
        exchange, update = self._functions
        while True:
            mean, reduced, of_tables = exchange()
            if mean == 0:  # nobody has a batch
                return
            update(mean, reduced, of_tables)


def _exchange(trainer: TableTrainer, step: _Step) -> Any:
    """The collectives of a step, by a worker without a batch."""

    def exchange() -> Any:
        lookups = []
        for features, insert in step.lookups:
            with tf.GradientTape() as tape:
                found = lookup.finish(lookup.begin([_empty(f) for f in features], insert))
                lookups.append((tape, tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in found])))
        # One by one, for they are taken in one order on all workers.
        gradients = [lookups[i][0].gradient(lookups[i][1], step.tables) for i in step.gradients]
        of_tables = []
        for parts, table in zip(zip(*gradients, strict=True), step.tables, strict=False):
            slices = [part for part in parts if part is not None]
            values, indices = (tf.concat([getattr(part, name) for part in slices], 0) for name in ("values", "indices"))
            of_tables.append((tf.IndexedSlices(values, indices), table))
        pairs = [(tf.zeros(v.shape, v.dtype) if has_gradient else None, v) for v, has_gradient in step.others]
        reduced, mean = reduction.reduce_weighted(pairs, trainer._op, of_tables, samples=0.0)
        return mean, [grad for grad in reduced if grad is not None], [(g.values, g.indices) for g, _ in of_tables]

    return exchange


def _update(optimizer: Any, step: _Step) -> Any:
    """What all workers do with the gradients of a step."""
    trainer, size = optimizer._tables, context.size()

    def update(mean: tf.Tensor, reduced: Any, of_tables: Any) -> None:
        scale = 1.0 / (mean * size) if trainer._op == reduction.Average else 1.0
        pairs: list[Any] = [(grad, v) for grad, (v, _) in zip(reduced, (o for o in step.others if o[1]), strict=True)]
        for (values, indices), table in zip(of_tables, step.tables, strict=True):
            pairs.append((tf.IndexedSlices(values * scale, indices), table))
        trainer.is_reduced = True
        try:
            optimizer.apply_gradients(pairs)
        finally:
            trainer.is_reduced = False

    return update


def _empty(f: Feature) -> Feature:
    keys = tf.zeros([0], f.key_dtype)
    # As many segments as a sample has features, or none.
    splits = None if f.combiner == ROWS else tf.zeros([1], tf.int64)
    return dataclasses.replace(f, ids=Csr(keys, row_splits=splits))
