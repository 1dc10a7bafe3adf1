"""Counts collectives and their bytes as they run.

Every collective carries a counter that costs well under a microsecond against the millisecond of the collective, so
nothing has to be switched on before a function is traced. The counter is also what keeps TensorFlow's graph optimizer
from folding or merging Horovod's ops, which do not declare that they are stateful.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops


def collective_counts(reset: bool = False) -> dict[str, Any]:
    """Returns how many collectives this worker has run since its start or the last reset, and their bytes.

    Args:
        reset: whether to count from zero again after this reading.

    Returns:
        `collectives`, `bytes` (handed over by this worker, its own share included) and `by_name`: for each name `kind`,
        `collectives`, `bytes`. Names end in a number where one graph has several. A job of one worker has none.

    Not collective. Safe from several threads.

    Example:
        >>> counts = collective_counts(reset=True)
        >>> collective_counts()
        {'collectives': 0, 'bytes': 0, 'by_name': {}}
    """
    return json.loads(run_now(lambda: _ops.lib().sok_trace_read(reset)))


def run_now(make: Callable[[], tf.Tensor]) -> Any:
    """The value of `make()`, also while a graph is being built."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return make().numpy()
    # A session of its own, with threads of its own: the first session of a process would decide those of all others.
    config = tf.compat.v1.ConfigProto(use_per_session_threads=True, device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return session.run(make())


class trace:
    """Counts the collectives that run inside a `with`, also those of functions that were traced before.

    After the `with` (or inside it, up to now): `collectives`, `bytes` and `by_name`, as `collective_counts` returns
    them. Do not reset the counts inside.

    Example:
        >>> with trace() as t:
        ...     pass
        >>> t.collectives, t.bytes, t.by_name
        (0, 0, {})
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._counts: dict[str, Any] | None = None

    def __enter__(self) -> trace:
        self._before, self._counts = collective_counts(), None
        return self

    def __exit__(self, *error: object) -> None:
        self._counts = self._so_far()

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return self._so_far()["collectives"]

    @property
    def bytes(self) -> int:
        """Bytes that this worker handed over."""
        return self._so_far()["bytes"]

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        """The same for each name."""
        return self._so_far()["by_name"]

    def _so_far(self) -> dict[str, Any]:
        if self._before is None:
            raise RuntimeError("sok.trace() counts inside a `with`: with sok.trace() as t: ...")
        return self._counts or _difference(collective_counts(), self._before)


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    by_name = {}
    for name, now in after["by_name"].items():
        then = before["by_name"].get(name, {"collectives": 0, "bytes": 0})
        calls = now["collectives"] - then["collectives"]
        if calls:
            by_name[name] = {"kind": now["kind"], "collectives": calls, "bytes": now["bytes"] - then["bytes"]}
    return {
        "collectives": sum(count["collectives"] for count in by_name.values()),
        "bytes": sum(count["bytes"] for count in by_name.values()),
        "by_name": by_name,
    }


def count(tensor: tf.Tensor, name: str, kind: str, turns: Sequence[tf.Tensor] = ()) -> tf.Tensor:
    """Returns `tensor`, counted as one collective whenever it passes. `turns`: see `sok.job.transport.ordering`."""
    return _ops.lib().sok_trace_collective(tensor, list(turns), collective=name, kind=kind)


def count_group(tensors: Sequence[tf.Tensor], name: str, kind: str, turns: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """Returns `tensors` (at least one), counted together as one collective.

    Of the second to last only those whose shape is known when the graph is built add to the bytes; dense gradients have
    the shapes of their variables.
    """
    first, *others = tensors
    more_bytes = sum((other.shape.num_elements() or 0) * other.dtype.size for other in others)
    with tf.control_dependencies(others):  # a profile shows it from when it can begin
        counted = _ops.lib().sok_trace_collective(first, list(turns), collective=name, kind=kind, more_bytes=more_bytes)
    return [counted, *others]


def done(result: tf.Tensor, name: str, turns: Sequence[tf.Tensor] = ()) -> tf.Tensor:
    """Returns what the collective of this name gave, and tells a running `sok.profile` that it is there."""
    return _ops.lib().sok_trace_collective_done(result, list(turns), collective=name)


def summarize_at_exit(rank: int) -> None:
    """With SOK_TRACE=1 in the environment, writes to stderr what ran when the process ends. (Files: sok.profile.)"""
    if os.environ.get("SOK_TRACE") != "1":
        return

    def summarize() -> None:
        counts = collective_counts()
        lines = [f"sok: rank {rank}: {counts['collectives']} collectives, {counts['bytes']} bytes"]
        for name, one in sorted(counts["by_name"].items()):
            lines.append(f"sok: rank {rank}:   {one['collectives']:>8} {one['bytes']:>14}  {one['kind']}  {name}")
        sys.stderr.write("\n".join(lines) + "\n")

    atexit.register(summarize)
