"""What went wrong on one worker goes wrong on all, in eager mode and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from sok.compat.formats.columns import FormatError
from sok.compat.formats.fitting import TableFull
from sok.job import context

T = TypeVar("T")

# Told to peers by name. Others arrive as RuntimeError.
_TOLD = (FormatError, FileNotFoundError, OSError, TableFull, ValueError, TypeError)


def text_of(error: Exception) -> bytes:
    """`error` as peers are told it: class, colon, message."""
    name = next((known.__name__ for known in _TOLD if isinstance(error, known)), "RuntimeError")
    return f"{name}: {error}".encode(errors="backslashreplace")


def attempt(function: Callable[..., None], *inputs: Any) -> tf.Tensor:
    """Calls `function` with arrays, when the graph runs. Gives what it raised as a string scalar, empty for nothing."""

    def run(*arrays: np.ndarray) -> bytes:
        try:
            function(*arrays)
        except Exception as error:
            return text_of(error)
        return b""

    text = tf.numpy_function(run, list(inputs), tf.string)
    return tf.reshape(text, [])


def together(name: str, function: Callable[[], T]) -> T:
    """`function()`; what it raises on one worker is raised on all, when executing eagerly. Collective, as `agree`."""
    if not tf.executing_eagerly():
        return function()
    result, text = None, b""
    try:
        result = function()
    except Exception as error:
        text = text_of(error)
    agree(tf.constant(text), name)
    return result


def agree(text: tf.Tensor, name: str, undo: Callable[[], None] | None = None) -> tf.Tensor:
    """Raises on all workers if `text` is not empty on one.

    Args:
        text: string scalar, as `attempt` gives it.
        name: of the collectives.
        undo: called before that, on all workers, in eager mode and in graphs.

    Returns:
        A scalar that is there when all workers have come and nothing was wrong.

    Raises:
        FormatError, FileNotFoundError, OSError, ...: the first worker's error, in eager mode.
        tf.errors.ResourceExhaustedError: it was `TableFull`.
        tf.errors.InvalidArgumentError: any error, in a graph.

    Collective: 2 collectives.
    """
    transport = context.get_transport()
    letters = tf.io.decode_raw(text, tf.uint8)
    lengths = transport.all_gather(tf.size(letters)[tf.newaxis], context.unique_collective_name(f"{name}/lengths"))
    everyone = transport.all_gather(letters, context.unique_collective_name(f"{name}/texts"))

    def told_by(*arrays: np.ndarray) -> bytes:
        text = _first(*arrays)
        if text and undo is not None:
            undo()
        return text.encode()

    if tf.executing_eagerly():
        told = told_by(everyone.numpy(), lengths.numpy()).decode()
        if told:
            raise _error(told)
        return tf.constant(True)
    told = tf.numpy_function(told_by, [everyone, lengths], tf.string)
    check = tf.debugging.Assert(tf.equal(told, ""), [told])
    with tf.control_dependencies([check]):
        return tf.constant(True)


def _first(letters: np.ndarray, lengths: np.ndarray) -> str:
    for rank, length in enumerate(lengths):
        if length:
            start = int(lengths[:rank].sum())
            text = letters[start : start + length].tobytes().decode()
            return text if len(lengths) == 1 else f"{text} (On rank {rank} of {len(lengths)}.)"
    return ""


def _error(told: str) -> Exception:
    name, _, message = told.partition(": ")
    if name == TableFull.__name__:
        return tf.errors.ResourceExhaustedError(None, None, message)
    return next((known for known in _TOLD if known.__name__ == name), RuntimeError)(message)
