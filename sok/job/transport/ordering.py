"""Keeps collectives of one name apart when TensorFlow may run the calls of a function in any order.

Horovod matches collectives by name, and a name is unique in the function that was traced. But a function may be called
twice in one step, and nothing says which call's collectives come first: ranks could match those of different calls.
Touching a resource before and after makes TensorFlow run them in the order of the program; those of other names stay
free to overlap.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

T = TypeVar("T")

# A name by which TensorFlow knows that a resource is its handle's, and ends with it.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"

# The functions that capture a turn keep it.
_turns: weakref.WeakValueDictionary[str, tf.Tensor] = weakref.WeakValueDictionary()
_lock = threading.Lock()

_ANSWERS, _EPOCH = "sok/answers", "sok/epoch"
_ended = 0  # jobs, as the counter of epochs has it: to read that one for each collective takes longer


def in_turn(name: str, collective: Callable[[list[tf.Tensor]], T]) -> T:
    """Returns what `collective(turns)` builds: inside a `tf.function` ordered among all others of this name.

    `turns` has the resource that orders them. It is empty elsewhere: eager calls run one by one as they are, and in a
    v1 graph every name is unique.
    """
    turns = _turns_of(name)
    if not turns:
        return collective(turns)
    one, is_of_this_job = _of_graph()

    def touch() -> list[tf.Operation]:
        return [tf.raw_ops.AssignAddVariableOp(resource=turn, value=one) for turn in turns]

    with tf.control_dependencies([is_of_this_job]), tf.control_dependencies(touch()):
        result = collective(turns)
    with tf.control_dependencies(tf.nest.flatten(result)):
        touch()
    return result


def _turns_of(name: str) -> list[tf.Tensor]:
    is_ordered = tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions()
    return [] if is_ordered else [counter(name)]


def answered(checked: tf.Tensor) -> None:
    """Has what a `tf.function` builds later in the program, inside `after_answers`, wait for `checked` of a lookup.

    A lookup that raises on one worker raises on all, but beside what does not need its rows. What changes state must
    wait for it, else some workers have changed theirs when the step ends.
    """
    for turn in _turns_of(_ANSWERS):
        with tf.control_dependencies([checked]):
            tf.raw_ops.ReadVariableOp(resource=turn, dtype=tf.int64)


def after_answers() -> contextlib.AbstractContextManager[None]:
    """Inside, ops of a `tf.function` run once all lookups before them in the program have their answers.

    Those of functions that it has called, of its loops and of its branches, too: TensorFlow writes a resource when all
    that read it before have done so. Elsewhere, and with one worker, nothing waits: eager calls run one by one; a
    v1 graph has no order of the program.
    """
    turn = _turns.get(_ANSWERS)  # none: no function has looked anything up
    if turn is None or not _turns_of(_ANSWERS):
        return contextlib.nullcontext()
    one, _ = _of_graph()
    return tf.control_dependencies([tf.raw_ops.AssignAddVariableOp(resource=turn, value=one)])


def _of_graph() -> tuple[tf.Tensor, tf.Operation]:
    """What all collectives of a graph share: the number one, and what fails if the graph is of a job that has ended.

    Made without dependencies: a constant inside would take over those of what uses it, which the graph optimizer may
    drop with it.
    """
    graph = tf.compat.v1.get_default_graph()
    found = getattr(graph, "_sok_of_graph", None)
    if found is None:
        with tf.control_dependencies(None), tf.device("/CPU:0"):
            epoch = tf.raw_ops.ReadVariableOp(resource=counter(_EPOCH), dtype=tf.int64)
            words = "This function was traced in a job that has ended. Make it anew, with new tables."
            check = tf.raw_ops.Assert(condition=tf.equal(epoch, _ended), data=[words])
            found = graph._sok_of_graph = tf.constant(1, tf.int64), check
    return found


def end_epoch() -> None:
    """Refuses the collectives of functions that are traced by now, as their job has ended."""
    global _ended
    _ended += 1
    epoch = _turns.get(_EPOCH)  # none: there is no such function
    if epoch is not None:
        with tf.init_scope():
            tf.raw_ops.AssignVariableOp(resource=epoch, value=tf.constant(_ended, tf.int64))


def counters(prefix: str) -> list[tf.Tensor]:
    """The handles of the counters that functions hold now, of names that begin so."""
    with _lock:
        return [handle for name, handle in list(_turns.items()) if name.startswith(prefix)]


def counter(name: str) -> tf.Tensor:
    """The handle of a counter, int64, that lives as long as a function holds it.

    No tf.Variable: functions object to those made while they are traced, and custom gradients to those they use.
    """
    with _lock:
        handle = _turns.get(name)
        if handle is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=_ANONYMOUS, container="")
                first = _ended if name == _EPOCH else 0
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(first, tf.int64))
            _turns[name] = handle
        return handle
