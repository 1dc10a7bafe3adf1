"""A cluster of processes of this host, forked before TensorFlow runs anything in this one: what it has begun would be
the same in all of them, its random numbers among it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

from sok.tools import parameter_server

_fork = multiprocessing.get_context("fork")


def free_ports(count: int) -> list[int]:
    """As many ports that nobody has now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Cluster:
    """Tasks of jobs, each a process. One of them may be killed, and begin anew as a process that waited for that."""

    def __init__(self, jobs: dict[str, int], begun: dict[str, int], spare: tuple[tuple[str, int], ...] = ()) -> None:
        ports = iter(free_ports(sum(jobs.values())))
        self.spec = {job: [f"127.0.0.1:{next(ports)}" for _ in range(tasks)] for job, tasks in jobs.items()}
        self.running = {(job, task): self.start(job, task) for job, tasks in begun.items() for task in range(tasks)}
        self._may_begin = {what: _fork.Event() for what in spare}
        self._spare = {what: self.start(*what, after=event) for what, event in self._may_begin.items()}

    def start(self, job: str, task: int, after: Any = None) -> Any:
        process = _fork.Process(target=_serve, args=(self.spec, job, task, after), daemon=True)
        process.start()
        return process

    def run(self, function: Any, *arguments: Any) -> Any:
        """A process for what has to be one of its own; `exitcode` tells its end."""
        process = _fork.Process(target=function, args=(self.spec, *arguments), daemon=True)
        process.start()
        return process

    def kill(self, job: str, task: int) -> None:
        self.running[job, task].kill()
        self.running[job, task].join(30)

    def begin_anew(self, job: str, task: int) -> None:
        self.running[job, task] = self._spare.pop((job, task))
        self._may_begin[job, task].set()

    def end(self) -> None:
        for process in (*self.running.values(), *self._spare.values()):
            process.kill()
        for process in (*self.running.values(), *self._spare.values()):
            process.join(30)


def _serve(spec: dict[str, list[str]], job: str, task: int, after: Any) -> None:
    if after is not None:
        after.wait()
    os._exit(parameter_server.run(spec, job, task))
