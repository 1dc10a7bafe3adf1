"""`tf.custom_gradient` that keeps no graph alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops


def custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.custom_gradient` of a function of tensors alone, whose gradient goes with the graph in which it is built.

    TensorFlow's own registers what it makes in a graph by a name, for the life of the process: with it stays the graph,
    a traced training step say, and all that the graph refers to. Here the graph has it.

    Example:
        >>> @custom_gradient
        ... def twice(x):
        ...     return 2 * x, lambda upstream: 3 * upstream
        >>> @tf.function
        ... def gradient(x):
        ...     return tf.gradients(twice(x), x)[0]
        >>> float(gradient(tf.constant(1.0)))
        3.0
    """
    of_tensorflow = tf.custom_gradient(f)

    @functools.wraps(f)
    def call(*tensors: tf.Tensor) -> Any:
        found = of_tensorflow(*tensors)
        if not tf.executing_eagerly():
            _move_to_graph(tf.nest.flatten(found)[0].op)
        return found

    return call


def _move_to_graph(op: tf.Operation) -> None:
    """Takes the gradient that was registered for `op` alone out of the registry, and leaves there how to find it."""
    graph, name = op.graph, op.get_attr("_gradient_op_type").decode()
    entry = ops.gradient_registry._registry[name]
    if not hasattr(graph, "_sok_gradients"):
        graph._sok_gradients = {}
    graph._sok_gradients[name] = entry["type"]
    held: Any = weakref.ref(graph)
    entry["type"] = lambda op, *upstream: held()._sok_gradients[name](op, *upstream)
    # Of a copy of the op, in another graph, TensorFlow then says that it has no gradient.
    weakref.finalize(graph, ops.gradient_registry._registry.pop, name, None).atexit = False
