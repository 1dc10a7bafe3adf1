"""Counts collectives and their bytes as they run.

Every collective carries a counter that costs well under a microsecond against the millisecond of the collective, so
nothing has to be switched on before a function is traced. The counter is also what keeps TensorFlow's graph optimizer
from folding or merging Horovod's ops, which do not declare that they are stateful.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.base.graph_ops import run_now

_lock = threading.Lock()
_forgotten: Counter[str] = Counter()  # of each name the bytes that a reset took from what is counted
_of_jobs_before: dict[str, int] = {}  # of each name the bytes when the last job ended


def collective_counts(reset: bool = False) -> dict[str, Any]:
    """Returns how many collectives this worker has run since its start or the last reset, and their bytes.

    Args:
        reset: whether to count from zero again after this reading.

    Returns:
        `collectives`, `bytes` (handed over by this worker, its own share included) and `by_name`: for each name `kind`,
        `collectives`, `bytes` and `seconds`, from when this worker had all that it sends until all had come: in part
        it waits for the slowest. Names end in a number where one graph has several. A job of one worker has none.

    Not collective. Safe from several threads.

    Example:
        >>> counts = collective_counts(reset=True)
        >>> collective_counts()
        {'collectives': 0, 'bytes': 0, 'by_name': {}}
    """
    with _lock:
        counts = json.loads(run_now(lambda: _ops.lib().sok_trace_read(reset)))
        if reset:
            _forgotten.update({name: one["bytes"] for name, one in counts["by_name"].items()})
    return counts


def bytes_of_lookups() -> Counter[str]:
    """What this worker has handed over for lookups since the job began, whatever was reset: bytes by `Group.name`."""
    found: Counter[str] = Counter()
    for name, total in _bytes_by_name().items():
        if parts := _LOOKUP.fullmatch(name):
            found[f"sok/{parts['tables']}"] += total - _of_jobs_before.get(name, 0)
    return found


def end_job() -> None:
    """Names of tables are free again: what was counted under them is of jobs before."""
    _of_jobs_before.update(_bytes_by_name())


def _bytes_by_name() -> Counter[str]:
    counts = collective_counts()["by_name"]
    with _lock:
        return _forgotten + Counter({name: one["bytes"] for name, one in counts.items()})


# The collectives of one lookup: sok/lookup/exchange.py.
_LOOKUP = re.compile(r"sok/(?P<tables>.+?)(/ahead\d+)?/(?P<what>keys|rows|grads)(/(?P<number>\d+))?")


class trace:
    """Counts the collectives that run inside a `with`, also those of functions that were traced before.

    After the `with` (or inside it, up to now): `collectives`, `bytes` and `by_name`, as `collective_counts` returns
    them; and `by_lookup`, for each lookup of tables on several workers, the slowest first: how often it ran, its
    collectives, bytes and seconds. Lookups overlap, so their seconds may sum to more than a step takes. `print(t)`
    shows them. Do not reset the counts inside.

    Example:
        >>> with trace() as t:
        ...     pass
        >>> t.collectives, t.bytes, t.by_name, t.by_lookup
        (0, 0, {}, {})
        >>> print(t)
        0 collectives, 0 bytes
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

    @property
    def by_lookup(self) -> dict[str, dict[str, Any]]:
        """`calls`, `collectives`, `bytes` and `seconds` of each lookup, named by its table; 'a+3': with 3 others."""
        found: dict[str, dict[str, Any]] = {}
        for name, count in self.by_name.items():
            if (parts := _LOOKUP.fullmatch(name)) is None:
                continue
            number = f" ({parts['number']})" if parts["number"] not in (None, "0") else ""
            one = found.setdefault(
                f"{parts['tables']}{number}", {"calls": 0, "collectives": 0, "bytes": 0, "seconds": 0.0}
            )
            one["calls"] += count["collectives"] * (parts["what"] == "keys")
            for what in ("collectives", "bytes", "seconds"):
                one[what] += count[what]
        return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))

    def __str__(self) -> str:
        lines = [f"{self.collectives:,} collectives, {self.bytes:,} bytes"]
        for name, one in self.by_lookup.items():
            calls = max(one["calls"], 1)
            lines.append(
                f"lookup '{name}': {one['calls']:,} calls, each {1000 * one['seconds'] / calls:.3g} ms, "
                f"{one['bytes'] / calls:,.0f} bytes"
            )
        return "\n".join(lines)

    def _so_far(self) -> dict[str, Any]:
        if self._before is None:
            raise RuntimeError("sok.trace() counts inside a `with`: with sok.trace() as t: ...")
        return self._counts or _difference(collective_counts(), self._before)


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    by_name = {}
    for name, now in after["by_name"].items():
        then = before["by_name"].get(name, {"collectives": 0, "bytes": 0, "seconds": 0.0})
        more = {what: now[what] - then[what] for what in ("collectives", "bytes", "seconds")}
        if more["collectives"]:
            by_name[name] = {"kind": now["kind"], **more}
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
            counts_of_one = f"{one['collectives']:>8} {one['bytes']:>14} {one['seconds']:>9.3f} s"
            lines.append(f"sok: rank {rank}:   {counts_of_one}  {one['kind']}  {name}")
        sys.stderr.write("\n".join(lines) + "\n")

    atexit.register(summarize)
