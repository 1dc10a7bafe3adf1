"""Keeps collectives of one name apart when TensorFlow may run the calls of a function in any order.

Horovod matches collectives by name, and a name is unique in the function that was traced. But a function may be called
twice in one step, and nothing says which call's collectives come first: ranks could match those of different calls.
Touching a resource before and after makes TensorFlow run them in the order of the program; those of other names stay
free to overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

T = TypeVar("T")

_turns: dict[str, tf.Tensor] = {}
_lock = threading.Lock()


def in_turn(name: str, collective: Callable[[], T]) -> T:
    """Returns what `collective()` builds, ordered among all others of this name when inside a `tf.function`.

    Eager calls run one by one as they are, and in a v1 graph every name is unique.
    """
    if not turns_of(name):
        return collective()
    (turn,) = turns_of(name)
    # Made out here: a constant inside would take over the dependency, which the graph optimizer may drop with it.
    one = tf.constant(1, tf.int64)
    with tf.control_dependencies([tf.raw_ops.AssignAddVariableOp(resource=turn, value=one)]):
        result = collective()
    with tf.control_dependencies(tf.nest.flatten(result)):
        tf.raw_ops.AssignAddVariableOp(resource=turn, value=one)
    return result


def turns_of(name: str) -> list[tf.Tensor]:
    """The resource that orders the collectives of this name; none where they are in order anyhow."""
    is_ordered = tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions()
    return [] if is_ordered else [_turn(name)]


def _turn(name: str) -> tf.Tensor:
    """The handle of a counter that lives as long as the process.

    No tf.Variable: functions object to those made while they are traced, and custom gradients to those they use.
    """
    with _lock:
        if name not in _turns:
            with tf.init_scope(), tf.device("/CPU:0"):
                shared_name = f"sok_turn/{name}"
                handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=shared_name, container="")
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
            _turns[name] = handle
        return _turns[name]
