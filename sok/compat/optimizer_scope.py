"""`OptimizerScope`: stock optimizers that take embedding variables, inside a `with` block."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from sok.base.patching import Here, Patch
from sok.job.job import Job
from sok.job.transport.ordering import after_answers
from sok.optimizers import Optimizer, matching_optimizer
from sok.optimizers.loss_scaling import follow_loss_scaler
from sok.optimizers.stock import stock_bases
from sok.table.table import is_embedding_variable


class OptimizerScope:
    """Inside it, `apply_gradients` of a stock TensorFlow or Keras optimizer may be given embedding variables.

    They may be mixed with other variables. Their pairs go to `sok.optimizers.matching_optimizer(stock)`, made once per
    stock optimizer; the rest goes to the stock optimizer as ever. One call counts as one step of the stock optimizer,
    whatever was in it. Optimizers of ours and `sok.DistributedOptimizer` need no scope and are not changed by one.

    Args:
        trainable_variables: list or tuple of the variables to be trained; may hold others besides embeddings.

    Raises:
        RuntimeError: `trainable_variables` is not a list or tuple.
        ValueError: from `apply_gradients` inside: the stock optimizer has no equivalent (momentum, other classes, ...).

    While a thread is inside, methods of the stock optimizer classes are wrapped; other threads see no
    difference, and when the last one leaves, also by an error, the methods are as they were. Scopes may be nested.
    What is traced or built inside keeps working outside.

    Example:
        >>> import keras, sok, tensorflow as tf
        >>> from sok.lookup.lookup import lookup_rows
        >>> table = sok.EmbeddingVariable(dim=1, capacity=8, initializer="ones", name="scope_example")
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(lookup_rows(table, tf.constant([1], tf.int64)))
        >>> gradient = tape.gradient(loss, table)
        >>> with sok.OptimizerScope([table]):
        ...     _ = keras.optimizers.SGD(0.25).apply_gradients([(gradient, table)])
        >>> table.sparse_read([1]).numpy().tolist()
        [[0.75]]

    Source: `OptimizerScope` of SOK v1.
    """

    def __init__(self, trainable_variables: list[Any] | tuple[Any, ...]) -> None:
        if not isinstance(trainable_variables, (list, tuple)):
            raise RuntimeError(
                "`trainable_variables` must be a list or tuple of variables. "
                f"Received: {type(trainable_variables).__name__}."
            )
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> OptimizerScope:
        stack = contextlib.ExitStack()
        stack.enter_context(_patch.begun())
        stack.enter_context(_scopes.inside(self))
        self._entered.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().close()


def open_for(job: Job) -> None:
    """As if every thread were inside a scope, until the job ends. Again for the same job it does nothing."""
    with _lock:
        if job in _open_for:
            return
        _open_for.add(job)
    _patch.begin()

    def close() -> None:
        _open_for.discard(job)
        _patch.end()

    job.at_end(close)


_scopes = Here()
_open_for: set[Job] = set()
_lock = threading.RLock()
# What a LossScaleOptimizer inside a scope hands on to: under a tf.distribute strategy it does so in another thread.
_handed_on: weakref.WeakSet[Any] = weakref.WeakSet()
_matched: weakref.WeakKeyDictionary[Any, Optimizer] = weakref.WeakKeyDictionary()


# Wrapping.

_LIBRARIES = ("keras", "tf_keras", "tensorflow")


def _stock_classes() -> Iterator[type]:
    """Optimizer classes of the libraries imported so far, bases included."""
    roots = tuple(stock_bases().values())
    seen: set[type] = set()
    waiting = [cls for root in roots for cls in (*root.__mro__, *root.__subclasses__())]
    while waiting:
        cls = waiting.pop()
        # Classes of others (Horovod's, a user's) that wrap an optimizer hand on to a stock one, which does the rest.
        if cls in seen or cls.__module__.partition(".")[0] not in _LIBRARIES:
            continue
        seen.add(cls)
        if issubclass(cls, roots):
            waiting += cls.__subclasses__()
        yield cls


def _methods() -> Iterator[tuple[type, str, Callable[[Any], Any]]]:
    for cls in list(_stock_classes()):
        for name, route in (("apply_gradients", _apply_gradients), ("apply", _apply), ("build", _build)):
            if callable(vars(cls).get(name)):
                yield cls, name, functools.partial(_wrapped, route)


_patch = Patch(_methods)


def _wrapped(route: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = type(self).__module__.partition(".")[0] == "sok"
        if is_ours or (_scopes.value is None and not _open_for and self not in _handed_on):
            return original(self, *args, **kwargs)
        if type(self).__name__.startswith("LossScaleOptimizer"):  # hands all on to the optimizer inside, unscaled
            _handed_on.add(self.inner_optimizer)
            try:
                return original(self, *args, **kwargs)
            finally:
                _handed_on.discard(self.inner_optimizer)
        return route(functools.partial(original, self), self, *args, **kwargs)

    return method


# Routing.


def _apply_gradients(original: Callable[..., Any], stock: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    if not _has_tables(variable for _, variable in pairs):
        return original(pairs, *args, **kwargs)
    update, others = _update_tables(stock, pairs)
    if others:
        with after_answers(), tf.control_dependencies([] if update is None else [update]):
            result = original(others, *args, **kwargs)
        is_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
        return tf.group(update, result) if is_v1_graph and result is not None else result
    return _finish_alone(stock, update, *args, **kwargs)


def _apply(original: Callable[..., Any], stock: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """The method of Keras 3 that `fit` calls."""
    variables = stock._trainable_variables if trainable_variables is None else list(trainable_variables)
    if not _has_tables(variables):
        return original(grads, trainable_variables)
    _, others = _update_tables(stock, list(zip(grads, variables, strict=True)))
    if others:
        with after_answers():
            return original([grad for grad, _ in others], [variable for _, variable in others])
    return None


def _build(original: Callable[..., Any], stock: Any, variables: Any) -> Any:
    """Called before the others by Keras 3's and tf_keras' LossScaleOptimizer."""
    follow_loss_scaler()
    return original([variable for variable in variables if not is_embedding_variable(variable)])


def _has_tables(variables: Any) -> bool:
    return any(is_embedding_variable(variable) for variable in variables)


def _update_tables(stock: Any, pairs: list[tuple[Any, Any]]) -> tuple[Any, list[tuple[Any, Any]]]:
    """Does the tables' part of a step; gives its op (graph) and the pairs that are left for the stock optimizer."""
    tables = [(grad, variable) for grad, variable in pairs if is_embedding_variable(variable)]
    others = [(grad, variable) for grad, variable in pairs if not is_embedding_variable(variable)]
    if all(grad is None for grad, _ in others):
        others = []
    # v1 optimizers have no counter to share. Of a shared one, each call adds one: the stock optimizer does if it runs.
    shares = not isinstance(stock, tf.compat.v1.train.Optimizer)
    with _lock:
        matched = _matched.get(stock)
        if matched is None:
            matched = _matched[stock] = matching_optimizer(stock, share_iterations=shares)
    return matched._apply(tables, counts_step=not (shares and others)), others


def _finish_alone(stock: Any, update: Any, global_step: Any = None, *_: Any, **__: Any) -> Any:
    """What a stock apply_gradients does and gives besides updating variables, when there are none for it."""
    if isinstance(stock, tf.compat.v1.train.Optimizer) and isinstance(global_step, tf.Variable):
        with tf.control_dependencies([] if update is None else [update]):
            added = global_step.assign_add(1)
        return None if update is None else tf.convert_to_tensor(added).op
    if tf.compat.v1.executing_eagerly_outside_functions():
        # In a function a legacy optimizer gives an op, as both branches of its LossScaleOptimizer have to.
        gives_op = hasattr(stock, "_create_hypers") and not tf.executing_eagerly()
        return tf.no_op() if gives_op else getattr(stock, "iterations", None)
    return update
