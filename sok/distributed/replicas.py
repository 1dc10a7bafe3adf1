"""Replicas of dense variables start alike, or somebody says that they do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops, keras_calls
from sok.base.types import KerasModel, StockOptimizer
from sok.distributed.broadcast import as_tf_variable, broadcast_variables
from sok.job import context, dead_peers
from sok.job.transport import ordering
from sok.table.table import is_embedding_variable

_SECOND = 2
_EAGER_STEPS = "_sok_eager_steps"  # an attribute of variables, which ends with them
_COUNTER = "sok/steps/"
_numbers = itertools.count()
_DIFFER = (
    "Variables differ between workers, which train replicas of one model. Give all of them the same values before the "
    "first step: sok.broadcast_variables(variables), or sok.callbacks.BroadcastVariablesCallback() in fit. Variables:"
)


def variables_of(model: KerasModel) -> Iterator[Any]:
    """The dense state that all workers share: weights, the optimizer's variables and its learning rate."""
    yield from model_weights(model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables = optimizer.variables
        yield from variables() if callable(variables) else variables
        # tf_keras does not count it among them.
        if isinstance(optimizer.learning_rate, tf.Variable):
            yield optimizer.learning_rate


def model_weights(model: KerasModel) -> Iterator[Any]:
    """The weights of a model that is built."""
    # tf_keras raises for a model that is not built, Keras 3 gives an empty list.
    if model.built:
        # Keras 3 lists the states of random generators: all workers would draw the same dropout masks.
        yield from (v for v in model.variables if getattr(v, "name", "") != "seed_generator_state")


def start_in_fit(optimizer: StockOptimizer) -> None:
    """Before the first step of an optimizer in Keras' `fit`: gives all workers worker 0's weights, if no callback does.

    A function that makes variables is traced twice, and before the second time these have values: so those of a model
    that the first step builds are given, too, but in eager mode after that step's gradients.

    Collective: on all workers, one collective, once.
    """
    if context.size() == 1 or vars(optimizer).get("_has_started") or _in_v1_graph():
        return
    fit = keras_calls.fit_that_runs()
    if fit is None:
        return
    model, callbacks = fit
    dead_peers.note_fit(model)
    with tf.init_scope():
        weights = [as_tf_variable(variable) for variable in model_weights(model)]
        if not all(bool(weight.is_initialized()) for weight in weights if not is_embedding_variable(weight)):
            return
        optimizer.__dict__["_has_started"] = True
        if not any(getattr(callback, "broadcasts_variables", False) for callback in callbacks):
            broadcast_variables(weights)


def end_of_fit(variables: Sequence[Any]) -> None:
    """Lets the second step from now on compare replicas again: between two fits somebody may have set one's weights."""
    if not tf.executing_eagerly():
        return
    for variable in variables:
        if vars(variable).get(_EAGER_STEPS, 0) >= _SECOND:
            vars(variable)[_EAGER_STEPS] = 0
    for counter in ordering.counters(_COUNTER):
        if tf.raw_ops.ReadVariableOp(resource=counter, dtype=tf.int64) >= _SECOND:
            tf.raw_ops.AssignVariableOp(resource=counter, value=tf.constant(0, tf.int64))


def told(variables: Sequence[Any]) -> tf.Tensor:
    """What a worker says of its variables in this step, before it changes them: [1 + n] float32.

    In the second step, and in that of each later `fit`, 1 and a checksum of each, else zeros. Not in the first:
    programs broadcast after it, when all variables have been made. Eagerly each variable counts its own steps.
    """
    nothing = tf.zeros([1 + len(variables)])
    if not variables or _in_v1_graph():
        return nothing

    def checksums(told: Sequence[bool] | None = None) -> tf.Tensor:
        told = told or [True] * len(variables)
        values = [v if is_told else tf.zeros([0]) for v, is_told in zip(variables, told, strict=True)]
        return tf.concat([[1.0], _ops.lib().sok_checksums([tf.convert_to_tensor(one) for one in values])], 0)

    if tf.executing_eagerly():
        for variable in variables:
            vars(variable)[_EAGER_STEPS] = vars(variable).get(_EAGER_STEPS, 0) + 1
        told = [vars(variable)[_EAGER_STEPS] == _SECOND for variable in variables]
        return checksums(told) if any(told) else nothing
    with tf.device("/CPU:0"):
        steps = ordering.counter(f"{_COUNTER}{next(_numbers)}")
        tf.raw_ops.AssignAddVariableOp(resource=steps, value=tf.constant(1, tf.int64))
        step = tf.raw_ops.ReadVariableOp(resource=steps, dtype=tf.int64)
        return tf.cond(tf.equal(step, _SECOND), checksums, lambda: nothing)


def check(reduced: tf.Tensor, mine: tf.Tensor, workers: int, names: Sequence[str]) -> Any:
    """Fails, on all workers alike, unless all told the same, if all told something.

    Args:
        reduced: sum or average of what was told, over all workers.
        mine: what `told` gave here.
        workers: how many were added up: 1 for an average.
        names: of the variables.
    """
    if not names:
        return None
    how = dict(workers=workers, size=context.size(), may_be_silent=True)
    return _ops.lib().sok_check_reduced(reduced, mine, problem=_DIFFER, names=list(names), **how)


def _in_v1_graph() -> bool:
    return not tf.compat.v1.executing_eagerly_outside_functions()
