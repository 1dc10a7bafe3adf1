"""The job: who we are in it, and how we talk to the others."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from sok.transport.base import Transport
from sok.transport.local import LocalTransport

_LAUNCHER_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class _Job:
    """What `Init` decided. One per process."""

    transport: Transport | None = None
    arguments: tuple[int | None, int] | None = None


_job = _Job()
_lock = threading.RLock()
_graph_counters: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _launched_size() -> int:
    """Workers that a launcher says there are; 1 without one."""
    for variable in _LAUNCHER_VARIABLES:
        text = os.environ.get(variable, "")
        if text.isdigit():
            return int(text)
    return 1


def _user_started_horovod() -> bool:
    hvd = sys.modules.get("horovod.tensorflow")
    try:
        return hvd is not None and hvd.is_initialized() and hvd.size() > 1
    except (AttributeError, ValueError):
        return False


def _make_transport() -> Transport:
    if _launched_size() == 1 and not _user_started_horovod():
        return LocalTransport()
    from sok.transport.horovod import HorovodTransport  # Horovod is optional

    return HorovodTransport()


def _check_batch(global_batch_size: Any, size: int) -> int | None:
    if global_batch_size is None:
        return None
    if isinstance(global_batch_size, bool) or int(global_batch_size) != global_batch_size or global_batch_size < size:
        raise ValueError(
            f"`global_batch_size` must be a whole number of at least the number of workers, {size}. "
            f"Received: {global_batch_size!r}."
        )
    if global_batch_size % size:
        raise ValueError(
            f"`global_batch_size` must be divisible by the number of workers, {size}. Received: {global_batch_size!r}."
        )
    return int(global_batch_size)


def Init(global_batch_size: int | None = None, seed: int | None = None) -> tf.Tensor:  # noqa: N802 (SOK's name)
    """Starts sok: call it once, before the first layer.

    Starts Horovod if a launcher (`horovodrun`, `mpirun`) started this process; else this is a world of one worker.

    Args:
        global_batch_size: samples of all workers in one step, divisible by their number. Optional; only checked.
        seed: of the initial values of tables. None means 0: the same model in every run, at any number of workers.

    Returns:
        A string tensor 'OK'; in a v1 graph, the op for `session.run`. Calling again does nothing.

    Raises:
        ValueError: a batch that cannot be split, or arguments other than those of the first call.
        tf.errors.InvalidArgumentError: workers passed different arguments; on every worker.

    Collective.

    Example:
        >>> Init(global_batch_size=64).numpy()
        b'OK'

    Source: `Init` of SOK v1, which fails when called twice and has no default seed.
    """
    with _lock:
        transport = _job.transport or _make_transport()
        arguments = (_check_batch(global_batch_size, transport.size), 0 if seed is None else int(seed))
        if _job.arguments is not None and arguments != _job.arguments:
            raise ValueError(
                f"sok.Init was called with (global_batch_size, seed) = {_job.arguments} before. "
                f"Received: {arguments}. Call sok.shutdown() first to start anew."
            )
        is_first = _job.arguments is None
        _job.transport, _job.arguments = transport, arguments
        if is_first and transport.size > 1:
            _explain_dead_peers(transport.rank)
    if transport.size == 1:
        return tf.constant("OK")
    mine = tf.constant([[-1 if arguments[0] is None else arguments[0], arguments[1]]], tf.int64)
    everyone = transport.all_gather(mine, unique_collective_name("sok/init"))
    same = tf.reduce_all(tf.equal(everyone, everyone[:1]))
    check = tf.debugging.Assert(
        same, ["sok.Init: workers passed different (global_batch_size, seed); -1 stands for None:", everyone], summarize=64
    )
    with tf.control_dependencies([check] if check is not None else []):
        return tf.constant("OK")


def get_transport() -> Transport:
    """How this worker talks to the others. Without `Init`, a world of one starts by itself."""
    if _job.transport is None:
        with _lock:
            if _job.transport is None:
                if _launched_size() > 1 or _user_started_horovod():
                    raise RuntimeError(
                        "sok.Init has not been called. Under horovodrun, call sok.Init(global_batch_size=...) once on "
                        "every worker before the first layer."
                    )
                _job.transport = LocalTransport()
    return _job.transport


def get_seed() -> int:
    """Seed of the initial values; 0 unless `Init` got another."""
    return _job.arguments[1] if _job.arguments else 0


def get_global_batch_size() -> int | None:
    """What `Init` was told, or None."""
    return _job.arguments[0] if _job.arguments else None


def rank() -> int:
    """This worker's number, 0 to `size()` - 1."""
    return get_transport().rank


def size() -> int:
    """Number of workers."""
    return get_transport().size


def local_rank() -> int:
    """This worker's number on its host."""
    return get_transport().local_rank


def shutdown() -> None:
    """Ends the job: stops Horovod if `Init` started it, and lets `Init` run anew. Tables made before stay usable alone."""
    with _lock:
        if _job.transport is not None:
            _job.transport.shutdown()
        _job.transport = _job.arguments = None


def unique_collective_name(base: str) -> str:
    """`base` and a number that depends only on the program being traced, so equal on all workers.

    Horovod matches collectives by name. The counter lives in the outermost graph under construction: whatever else a
    worker has traced before does not matter. Eager calls run one by one and need no number.
    """
    if tf.executing_eagerly():
        return base
    graph = ops.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    counters = _graph_counters.setdefault(graph, {})
    return f"{base}/{next(counters.setdefault(base, itertools.count()))}"


def _explain_dead_peers(this_rank: int) -> None:
    previous = sys.excepthook

    def hook(kind: type, error: BaseException, traceback: Any) -> None:
        previous(kind, error, traceback)
        text = f"{kind.__name__}: {error}"
        if "Horovod" in text or "Connection closed by peer" in text or "gloo" in text.lower():
            print(
                f"sok: rank {this_rank}: another worker stopped (see its output above); this one cannot go on alone.",
                file=sys.stderr,
                flush=True,
            )

    sys.excepthook = hook
