"""One program for eager mode, `tf.function` and v1 graphs."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def run_or_build(program: Callable[[], tf.Tensor]) -> tf.Tensor:
    """`program()` at once when executing eagerly; in a graph, as a function: loops inside one may hold collectives."""
    if tf.executing_eagerly():
        return program()
    return tf.function(program, autograph=False)()
