"""What all ranks do together: each does its part, and an error of one is raised on all.

Eagerly, and also while a v1 graph is built, `together` and `done_by_all` do so at once. `agree` does so when a graph
runs, with what `attempt` has caught there.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from sok.base import errors
from sok.base.graph_ops import run_now
from sok.job import context
from sok.job.transport.base import Transport

T = TypeVar("T")

# What peers raise when a rank raised this, made from its text. Of others, RuntimeError.
_RAISED: dict[str, Callable[[str], Exception]] = {
    **{name: functools.partial(kind, None, None) for name, kind in vars(tf.errors).items() if name.endswith("Error")},
    **{kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, NotImplementedError, OSError)},
    **{kind.__name__: kind for kind in (FileNotFoundError, FileExistsError, PermissionError)},
    **errors.OURS,
    errors.TableFull.__name__: functools.partial(tf.errors.ResourceExhaustedError, None, None),
}


def together(
    transport: Transport, name: str, part: Callable[[], Any], undo: Callable[[], None] | None = None
) -> list[Any]:
    """Runs `part()` on every rank and gives all ranks what each returned, rank 0's first. Collective.

    Args:
        transport: to the other ranks.
        name: of the one collective that this takes.
        part: returns what JSON can hold.
        undo: called before an error is raised, if it is certain that no rank goes on: all know that one has failed, or
            this one was interrupted and has told nobody. Not if a peer was lost: others may have heard from it before.

    Raises:
        Exception: `part` raised on some rank. The first of these ranks is named, and all raise the same class.
    """
    undo = undo or (lambda: None)
    error: Exception | None = None
    try:
        value = part()
        text = json.dumps({"value": value})
    except Exception as caught:  # whatever it is, the peers must not wait for this rank
        error, text = caught, json.dumps({"error": describe(caught)})
    except BaseException:
        undo()
        raise
    if transport.size == 1:
        if error is not None:
            undo()
            raise error
        return [value]
    everyone = run_now(lambda: _gathered(transport, name, tf.constant(text)))
    said = [json.loads(answer) for answer in _texts(everyone)]
    if failed := first_error([answer.get("error", "") for answer in said]):
        undo()
        raise exception_of(failed) from error
    return [answer["value"] for answer in said]


def done_by_all(transport: Transport, name: str, part: Callable[[], T]) -> T:
    """`part()` of this rank, which JSON need not hold, once all ranks have done theirs; else as `together`."""
    mine: list[T] = []
    together(transport, name, lambda: mine.append(part()))
    return mine[0]


def check_equal(said: list[Any], what: str) -> Any:
    """The one value that all ranks passed; ValueError, on all ranks, if they differ."""
    for rank, value in enumerate(said):
        if value != said[0]:
            raise ValueError(f"{what} must be the same on all workers. Rank 0 has {said[0]!r}, rank {rank} {value!r}.")
    return said[0]


def attempt(function: Callable[..., None], *inputs: Any) -> tf.Tensor:
    """Calls `function` with arrays, when the graph runs. `describe`s what it raised: a scalar, empty for nothing."""

    def run(*arrays: np.ndarray) -> bytes:
        try:
            function(*arrays)
        except Exception as error:
            return describe(error).encode(errors="backslashreplace")
        return b""

    return tf.reshape(tf.numpy_function(run, list(inputs), tf.string), [])


def agree(transport: Transport, name: str, text: str | tf.Tensor, undo: Callable[[], None] | None = None) -> tf.Tensor:
    """Raises on all ranks if `text` is not empty on one, eagerly or when the graph runs.

    Args:
        transport: to the other ranks.
        name: of the one collective that this takes.
        text: string scalar, as `attempt` gives it.
        undo: called before that, on all ranks.

    Returns:
        A scalar that is there when all ranks have come and nothing was wrong.

    Raises:
        Exception: what the first rank's text describes, eagerly.
        tf.errors.InvalidArgumentError: with that text, in a graph.
    """
    everyone = _gathered(transport, context.unique_collective_name(name), text)

    def told(everyone: np.ndarray) -> str:
        failed = first_error(_texts(everyone))
        if failed and undo is not None:
            undo()
        return failed

    if tf.executing_eagerly():
        if failed := told(everyone.numpy()):
            raise exception_of(failed)
        return tf.constant(True)
    # A step in which nothing is wrong calls no Python.
    is_good = tf.equal(tf.size(everyone), 8 * transport.size)
    words = tf.cond(is_good, lambda: "", lambda: tf.reshape(tf.numpy_function(told, [everyone], tf.string), []))
    with tf.control_dependencies([tf.debugging.Assert(is_good, [words])]):
        return tf.constant(True)


def plain_text(error: Exception) -> str:
    """What an error says, without what TensorFlow puts around the words of our ops.

    >>> plain_text(tf.errors.DataLossError(None, None, "{{function_node __wrapped__A}} a.shard: cut off [Op:A]"))
    'a.shard: cut off'
    """
    if not isinstance(error, tf.errors.OpError):
        return str(error)
    return re.sub(r"^\{\{function_node [^}]*\}\} | \[Op:[^\]]*\]$", "", error.message)


def describe(error: Exception) -> str:
    """An error as a text, for `exception_of` on another rank: class, colon, message.

    >>> describe(FileNotFoundError("a.shard is not there"))
    'FileNotFoundError: a.shard is not there'
    """
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _RAISED), "RuntimeError")
    return f"{kind}: {plain_text(error) or type(error).__name__}"


def first_error(said: Sequence[str]) -> str:
    """The first that is not empty of what ranks have `describe`d, with the rank that said it; else empty.

    >>> first_error(["", "OSError: disk full"])
    'OSError: rank 1 of 2: disk full'
    """
    for rank, text in enumerate(said):
        if text:
            kind, _, message = text.partition(": ")
            return text if len(said) == 1 else f"{kind}: rank {rank} of {len(said)}: {message}"
    return ""


def exception_of(text: str) -> Exception:
    """An error of the class that `describe` has seen."""
    kind, _, message = text.partition(": ")
    return _RAISED.get(kind, RuntimeError)(message)


def _gathered(transport: Transport, name: str, text: Any) -> tf.Tensor:
    """The texts of all ranks, each after its length in 8 bytes."""
    letters = tf.io.decode_raw(text, tf.uint8)
    length = tf.bitcast(tf.size(letters, tf.int64), tf.uint8)
    return transport.all_gather(tf.concat([length, letters], 0), name)


def _texts(everyone: np.ndarray) -> list[str]:
    data, said = everyone.tobytes(), []
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        said.append(data[8:end].decode(errors="replace"))
        data = data[end:]
    return said
