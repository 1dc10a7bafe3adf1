"""What all ranks do together: each does its part, and an error of one is raised on all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.errors import CheckpointError
from sok.job.transport.base import Transport, run_now

# What peers raise when a rank raised this. Of others, RuntimeError.
_KINDS = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, FileNotFoundError, PermissionError, OSError, RuntimeError, CheckpointError)
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
    value = None
    text = ""
    try:
        value = part()
        text = json.dumps({"value": value})
    except Exception as caught:  # whatever it is, the peers must not wait for this rank
        error = caught
    except BaseException:
        undo()
        raise
    if transport.size == 1:
        if error is not None:
            undo()
            raise error
        return [value]
    said = _gather_texts(transport, name, text if error is None else json.dumps(describe(error)))
    failed = [(rank, answer) for rank, answer in enumerate(said) if "value" not in answer]
    if not failed:
        return [answer["value"] for answer in said]
    undo()
    rank, answer = failed[0]
    raise exception_of(answer, f"rank {rank} of {transport.size}: {answer['text']}") from error


def gather(transport: Transport, name: str, value: Any) -> list[Any]:
    """What each rank passed as `value`, which JSON can hold. Collective."""
    return _gather_texts(transport, name, json.dumps(value))


def _gather_texts(transport: Transport, name: str, text: str) -> list[Any]:
    framed = len(text.encode()).to_bytes(8, "little") + text.encode()
    mine = np.frombuffer(framed, np.uint8)
    everything = np.asarray(run_now(lambda: transport.all_gather(tf.constant(mine), name))).tobytes()
    said, at = [], 0
    while at < len(everything):
        end = at + 8 + int.from_bytes(everything[at : at + 8], "little")
        said.append(json.loads(everything[at + 8 : end]))
        at = end
    return said


def check_equal(said: list[Any], what: str) -> Any:
    """The one value that all ranks passed; ValueError, on all ranks, if they differ."""
    for rank, value in enumerate(said):
        if value != said[0]:
            raise ValueError(f"{what} must be the same on all workers. Rank 0 has {said[0]!r}, rank {rank} {value!r}.")
    return said[0]


def plain_text(error: tf.errors.OpError) -> str:
    """What our op said, without what TensorFlow puts around it.

    >>> plain_text(tf.errors.DataLossError(None, None, "{{function_node __wrapped__A}} a.shard: cut off [Op:A]"))
    'a.shard: cut off'
    """
    return re.sub(r"^\{\{function_node [^}]*\}\} | \[Op:[^\]]*\]$", "", error.message)


def described_error(error: Exception) -> str:
    """What an error says, without what TensorFlow puts around it."""
    return plain_text(error) if isinstance(error, tf.errors.OpError) else str(error)


def describe(error: Exception) -> dict[str, Any]:
    """An error as JSON can hold it, for `exception_of` on another rank."""
    if isinstance(error, tf.errors.OpError):
        return {"kind": "OpError", "code": error.error_code, "text": plain_text(error)}
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
    return {"kind": kinds[0] if kinds else "RuntimeError", "text": f"{error}" or type(error).__name__}


def exception_of(answer: dict[str, Any], text: str) -> Exception:
    """An error of the class that `describe` has seen."""
    if answer["kind"] == "OpError":
        return tf.compat.v1.errors.exception_type_from_error_code(answer["code"])(None, None, text)
    return _KINDS[answer["kind"]](text)
