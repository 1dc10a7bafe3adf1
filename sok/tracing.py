"""Counts collectives and their bytes as they run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from sok import _ops

_forced: bool | None = None


def is_on() -> bool:
    """Whether collectives built now are counted: inside `trace()`, or with SOK_TRACE=1 in the environment."""
    return os.environ.get("SOK_TRACE", "0") not in ("", "0") if _forced is None else _forced


def collective_counts(reset: bool = False) -> dict[str, Any]:
    """What ran since the start or the last reset.

    Returns:
        `collectives` and `bytes` sent by this worker, in all, and `by_name`: the same for each collective with its kind.

    Example:
        >>> collective_counts(reset=True)["collectives"] >= 0
        True
    """
    with tf.init_scope():
        text = _ops.lib().sok_trace_read(reset)
        if not tf.executing_eagerly():
            with tf.compat.v1.Session() as session:
                text = session.run(text)
            return json.loads(text)
    return json.loads(text.numpy())


@contextlib.contextmanager
def trace() -> Iterator[None]:
    """Counts the collectives of everything that is built (eagerly run, or traced by `tf.function`) inside.

    Example:
        >>> with trace():
        ...     pass
    """
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before


def count(tensor: tf.Tensor, name: str, kind: str) -> tf.Tensor:
    """`tensor`, counted as one collective when it passes."""
    return _ops.lib().sok_trace_collective(tensor, collective=name, kind=kind) if is_on() else tensor


def count_group(tensors: list[tf.Tensor], name: str, kind: str) -> list[tf.Tensor]:
    """`tensors`, counted together as one collective."""
    if not is_on():
        return tensors
    sizes = [tf.size(t, out_type=tf.int64) * t.dtype.size for t in tensors]
    counted = count(tf.zeros(tf.reshape(tf.add_n(sizes), [1]), tf.uint8), name, kind)
    with tf.control_dependencies([counted]):
        return [tf.identity(t) for t in tensors]
