"""Measures the constants of a machine with the operations that training runs: for `sok doctor --measure`.

What one worker does alone is measured in a process of its own, on all workers at once, since they share cores and
memory: `python -m sok.planning.measuring` prints it. Links are measured by the job itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sok.planning import machine as machines
from sok.planning.fitting import SHAPES, Shape, fitted
from sok.planning.machine import Link, Machine

DIMS = (4, 16, 64, 256)
LINK_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_KEYS = 200_000  # of one call
_OUT_BYTES = 1 << 25  # and of its rows: as much as batches have, whose memory is not new to the process
_TABLE_BYTES = 1 << 28  # larger than a cache
_TABLES = 32

# What launchers tell their workers: a process that measures alone must not wait for others.
_OF_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


def measure(memory: int, table_bytes: int = _TABLE_BYTES, shapes: Sequence[Shape] = SHAPES) -> Machine:
    """Measures this machine, and with several workers their links. Collective. Takes about a minute.

    Each operation alone, first; then constants are fitted to training steps (fitting.py).

    Args:
        memory: bytes that the workers of a host have together.
        table_bytes: of the tables that are measured.
        shapes: models whose steps the constants are fitted to.

    Returns:
        The machine, equal on all ranks but for noise. Links that no worker crosses are those of `machine.DEFAULT`.
    """
    from sok.job import context

    transport = context.get_transport()
    local_ranks = transport.all_gather(_tensor([transport.local_rank]), "sok/measure/hosts").numpy().tolist()
    hosts = local_ranks.count(0)
    transport.barrier("sok/measure/alone")
    alone = _measured_alone(table_bytes)
    transport.barrier("sok/measure/links")
    base, workers = machines.load(machines.DEFAULT), transport.size
    changes: dict[str, Any] = {
        **{name: {int(size): rate for size, rate in rates.items()} for name, rates in alone["rates"].items()},
        **alone["constants"],
        "name": f"this machine, {workers} worker{'s' * (workers > 1)} on {hosts} host{'s' * (hosts > 1)}",
        "source": f"Measured here by `sok doctor --measure`. {_unmeasured(workers, hosts, base)}",
        "memory": memory * hosts // workers,
        "measured": {"workers": workers, "hosts": hosts, "table_bytes": table_bytes},
    }
    if workers > 1:
        place = "within" if hosts == 1 else "between"
        (to_all, to_all_points), (reduced, reduced_points) = _links(transport)
        changes |= {place: to_all, f"all_reduce_{place}": reduced}
        changes["measured"] |= {"all_to_all": to_all_points, "all_reduce": reduced_points}
    return fitted(dataclasses.replace(base, **changes), shapes=shapes)


def _unmeasured(workers: int, hosts: int, base: Machine) -> str:
    missing = "all links" if workers == 1 else "links between hosts" if hosts == 1 else "links within a host"
    return f"Not measured: {missing}, which are those of {base.name}."


def _tensor(values: Sequence[int]) -> Any:
    import tensorflow as tf

    return tf.constant(values, tf.int32)


def _measured_alone(table_bytes: int) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    command = [sys.executable, "-m", "sok.planning.measuring", str(table_bytes)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {answer.stderr.strip()[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def _links(transport: Any) -> tuple[tuple[Link, list[list[float]]], tuple[Link, list[list[float]]]]:
    """All-to-all and all-reduce, of each the link and its points: bytes that a rank sends, seconds."""
    import tensorflow as tf

    workers, to_all, reduced = transport.size, [], []
    for sent in LINK_BYTES:
        each = max(1, sent // 4 // (workers - 1))
        rows, splits = tf.zeros([each * workers]), tf.fill([workers], each)
        to_all.append(
            [4.0 * each * (workers - 1), _seconds(lambda: transport.all_to_all(rows, splits, "sok/measure/a")[0])]  # noqa: B023
        )
        weights = tf.zeros([sent // 4])
        reduced.append(
            [
                2 * (workers - 1) / workers * sent,
                _seconds(lambda: transport.grouped_all_reduce([weights], "sok/measure/r", False)[0]),  # noqa: B023
            ]
        )
    return (link_through(to_all), to_all), (link_through(reduced), reduced)


def link_through(points: Sequence[Sequence[float]]) -> Link:
    """The link of measured points: the latency of the smallest message, the bandwidth of what larger ones add.

    Args:
        points: bytes sent and seconds, by rising bytes.

    Example:
        >>> link_through([[0, 1e-3], [1e6, 2e-3], [3e6, 4e-3]])
        Link(latency=0.001, bandwidth=1000000000.0)
    """
    (first, latency), (most, longest) = points[0], points[-1]
    return Link(latency, (most - first) / max(longest - latency, 1e-9))


def _seconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """The median time of a call that gives a tensor, after a first one."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run().numpy()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def alone(table_bytes: int = _TABLE_BYTES) -> dict[str, Any]:
    """What one worker does by itself: `rates` by bytes, and `constants`."""
    import tensorflow as tf

    from sok.base import _ops

    gather, update = {}, {}
    for dim in DIMS:
        gather[4 * dim], update[8 * dim] = _rows(dim, table_bytes // (8 * dim))
    keys = tf.constant(np.random.default_rng(0).integers(2**40, size=_KEYS))
    floats, square = tf.zeros([table_bytes // 8]), tf.ones([1024, 1024])
    one, many = _step(1), _step(_TABLES)
    constants = {
        "stream": 8 * len(floats) / _seconds(lambda: floats + 1.0),
        "unique": _KEYS / _seconds(lambda: _ops.lib().sok_unique(keys, with_counts=False)[0]),
        "probe": _probes(gather[4 * DIMS[0]]),
        "flops": 2 * 1024**3 / _seconds(lambda: square @ square),
        "per_table": max(many - one, 0.0) / (_TABLES - 1),
        "per_piece": 0.0,  # told apart by the fit alone, of several workers
        "per_step": one,
    }
    return {"rates": {"gather": gather, "update": update}, "constants": constants}


def _table(name: str, dim: int, rows: int, hashed: bool) -> Any:
    from sok.table.options import TableOptions
    from sok.table.table import EmbeddingVariable

    options = TableOptions(initializer="zeros", hashed=hashed, seed=1)
    return EmbeddingVariable(dim, rows, name=f"sok_measure_{name}_{dim}", options=options)


def _filled(name: str, dim: int, rows: int, hashed: bool = False) -> tuple[Any, Any]:
    """A table that has all its rows, and keys of it in no order, none twice."""
    import tensorflow as tf

    from sok.lookup import lookup

    table = _table(name, dim, rows, hashed)
    for start in range(0, rows, 1 << 20):
        lookup.lookup_rows(table, tf.range(start, min(rows, start + (1 << 20)), dtype=tf.int64), training=True)
    random = np.random.default_rng(0)
    return table, tf.constant(random.choice(rows, size=min(_KEYS, rows, _OUT_BYTES // (4 * dim)), replace=False))


def _rows(dim: int, rows: int) -> tuple[float, float]:
    """Bytes a second of rows that are read, and of records that Adagrad changes."""
    import tensorflow as tf

    from sok.lookup import lookup
    from sok.optimizers import Adagrad

    table, keys = _filled("rows", dim, rows)
    read = _seconds(lambda: lookup.lookup_rows(table, keys, training=False))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup.lookup_rows(table, keys, training=True))
    gradient, optimizer = tape.gradient(loss, table), Adagrad(0.1)

    def change() -> Any:
        optimizer.apply_gradients([(gradient, table)])
        return tf.constant(0)

    changed = _seconds(change)
    return 4 * dim * len(keys) / read, 2 * 8 * dim * len(keys) / changed


def _probes(gather: float) -> float:
    """Keys a second that a hashed table finds, beside what it takes to read their rows."""
    from sok.lookup import lookup

    dim = DIMS[0]
    table, keys = _filled("probes", dim, 1_000_000, hashed=True)
    seconds = _seconds(lambda: lookup.lookup_rows(table, keys, training=False))
    return len(keys) / max(seconds - 4 * dim * len(keys) / gather, 0.1 * seconds)


def _step(number: int) -> float:
    """Seconds of a training step of so many tables, each with next to nothing to do."""
    import tensorflow as tf

    from sok.lookup.group import group_embedding_lookup
    from sok.optimizers import Adagrad

    tables = [_table(f"step_{number}_{i}", 4, 16, hashed=False) for i in range(number)]
    ids, optimizer = tf.zeros([1], tf.int64), Adagrad(0.1)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            rows = group_embedding_lookup(tables, [ids] * number)
            loss = tf.add_n([tf.reduce_sum(row) for row in rows])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return loss

    return _seconds(step, repeats=20)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(alone(*map(int, sys.argv[1:]))) + "\n")
