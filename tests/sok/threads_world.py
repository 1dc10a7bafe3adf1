"""Several ranks in one process: each a thread, with a transport that hands tensors over by name. Eager only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from sok.base import names
from sok.job import context
from sok.job.job import Job

_DEADLINE = 30.0  # seconds; a rank that waits longer for its peers has lost them


class _Meeting:
    """Where the ranks of one collective bring what they have, and take what all have brought."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size

    def swap(self, rank: int, what: Any) -> list[Any]:
        self._brought[rank] = what
        self._barrier.wait(_DEADLINE)
        taken = list(self._brought)
        self._barrier.wait(_DEADLINE)  # nobody brings the next before all have taken this
        return taken


class ThreadTransport:
    """One rank's side. Counts the collectives that it took part in."""

    name = "threads"
    local_rank = 0
    adds_on_gpu = False

    def __init__(self, rank: int, size: int, meeting: _Meeting):
        self.rank, self.size, self._meeting = rank, size, meeting
        self.collectives: list[str] = []

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        ends = np.cumsum(splits.numpy())
        assert ends[-1] == tensor.shape[0]
        parts = np.split(tensor.numpy(), ends[:-1])
        brought = self._collect(name, parts)
        received = [parts[self.rank] for parts in brought]
        return tf.constant(np.concatenate(received)), tf.constant([len(p) for p in received], tf.int32)

    def narrowing_pays(self) -> bool:
        return True

    def shutdown(self) -> None:
        pass

    def grouped_all_reduce(self, tensors: Sequence[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        brought = self._collect(name, [t.numpy() for t in tensors])
        sums = [np.sum(column, axis=0) for column in zip(*brought, strict=True)]
        return [tf.constant(s / self.size if average else s) for s in sums]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.constant(np.concatenate(self._collect(name, tensor.numpy())))

    def broadcast_numpy(self, array: np.ndarray, name: str, root_rank: int = 0) -> np.ndarray:
        return self._collect(name, array)[root_rank]

    def _collect(self, name: str, what: Any) -> list[Any]:
        self.collectives.append(name)
        brought = self._meeting.swap(self.rank, (name, what))
        assert {other for other, _ in brought} == {name}, "ranks met in different collectives"
        return [w for _, w in brought]


def run_world(size: int, program: Callable[[ThreadTransport], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """program(transport) on each of `size` ranks at once. Gives what each returned, or the exception that it raised."""
    here = threading.local()
    monkeypatch.setattr(context, "get_job", lambda: here.job)
    monkeypatch.setattr(names, "of_job", lambda: here.names)  # as if each rank were a process that has just begun
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    jobs = [Job(ThreadTransport(rank, size, meeting)) for rank in range(size)]

    def run(rank: int) -> None:
        here.job, here.names = jobs[rank], names.Names()
        try:
            results[rank] = program(here.job.transport)
        except Exception as error:  # the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _DEADLINE)
    for job in jobs:
        job.end()
    return results


def checked(results: list[Any]) -> list[Any]:
    """The results, if no rank failed."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
