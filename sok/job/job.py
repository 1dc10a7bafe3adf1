"""`Job`: who this worker is, among which others. Tables hold theirs."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

from sok.base import tracing
from sok.job import dead_peers
from sok.job.beside import Beside
from sok.job.servers import Servers
from sok.job.transport import ordering
from sok.job.transport.base import Transport

SECONDS_TO_LEAVE = 5.0  # at the end of a program: peers that are as far take milliseconds
_epochs = itertools.count(1)


@dataclasses.dataclass(eq=False)
class Job:
    """A group of workers, from `sok.Init` (of one process: from its first table) to `sok.shutdown()`.

    A table belongs to the job that it was made in, and asks it for rank, size, transport and seed. Another job, be it
    of as many workers, has another `epoch`: tables of the one before are refused, and so are functions that were traced
    for it, once they reach a collective.

    Args:
        transport: how this worker reaches the others.
        seed: of the initial values of tables.
        global_batch_size: samples of all workers in one step; None: not known.
        deadline: seconds that a collective may wait for workers; 0: for ever.
        servers: what holds the rows of tables; None: the workers themselves. Workers of servers know nothing of one
            another: each is the one worker of its job.

    Example:
        >>> from sok.job.transport.local import LocalTransport
        >>> job, other = Job(LocalTransport(), seed=7), Job(LocalTransport())
        >>> job.rank, job.size, job.seed, job.has_ended, other.epoch > job.epoch
        (0, 1, 7, False, True)
    """

    transport: Transport
    seed: Any = 0
    global_batch_size: Any = None
    deadline: float = 0.0
    servers: Servers | None = None
    epoch: int = dataclasses.field(default_factory=_epochs.__next__, init=False)
    has_ended: bool = dataclasses.field(default=False, init=False)
    has_tables: bool = dataclasses.field(default=False, init=False)
    _endings: list[Callable[[], None]] = dataclasses.field(default_factory=list, init=False, repr=False)
    _is_left_at_exit: bool = dataclasses.field(default=False, init=False, repr=False)
    _beside: weakref.WeakSet[Beside] = dataclasses.field(default_factory=weakref.WeakSet, init=False, repr=False)

    @property
    def rank(self) -> int:
        """This worker's number, from 0 to `size - 1`."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.transport.size

    @property
    def holders(self) -> int:
        """How many hold rows of tables: the workers, or the servers."""
        return self.size if self.servers is None else self.servers.size

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its host."""
        return self.transport.local_rank

    def to_attributes(self) -> dict[str, int]:
        """The attributes by which native ops know it."""
        return {"world_size": self.size, "rank": self.rank}

    def leave(self, seconds: float | None = None) -> list[Beside]:
        """Ends what goes on beside the program: peers are told. Gives what is not done in `seconds`; None: waits."""
        left = {beside.leave(): beside for beside in list(self._beside)}
        return [left[one] for one in futures.wait(left, seconds).not_done]

    def at_leave(self, beside: Beside) -> None:
        """Has it ended by `leave`: before the job ends, and where the program does."""
        if not self._is_left_at_exit:
            self._is_left_at_exit = True
            atexit.register(_leave_at_exit, weakref.ref(self))
        self._beside.add(beside)

    def end(self) -> None:
        """Ends it: its tables, and functions that were traced for it, are refused from now on."""
        self.transport.shutdown()
        self.has_ended = True
        if self.size > 1:
            tracing.end_job()
        ordering.end_epoch()
        while self._endings:
            self._endings.pop()()

    def at_end(self, do: Callable[[], None]) -> None:
        """Has `do()` called when the job ends: what was set for the length of a job is taken back. The last first."""
        self._endings.append(do)

    def __repr__(self) -> str:
        ended = ", ended" if self.has_ended else ""
        servers = f", {self.servers.size} servers" if self.servers else ""
        return (
            f"<Job {self.epoch}: rank {self.rank} of {self.size}, {self.transport.name}, seed {self.seed}{servers}"
            f"{ended}>"
        )


def _leave_at_exit(held: weakref.ref[Job]) -> None:
    job = held()
    if job is not None and dead_peers.own_end()[0] == dead_peers.WELL:
        job.leave(SECONDS_TO_LEAVE)


def job_of(tables: Iterable[Any]) -> Job:
    """The one job of these tables, at least one. To be asked before anything is done to them on all workers.

    Raises:
        RuntimeError: the job of a table has ended.
        ValueError: the tables are of different jobs.
    """
    first, *others = tables
    for table in (first, *others):
        if table.job.has_ended:
            raise RuntimeError(
                f"The embedding table '{table.table_name}' is of a job that has ended: {table.job!r}. Make the table, "
                "and what has it (layer, model, optimizer), anew in the job of now. `table.export()` still gives its "
                "rows, and `assign` stores them in another table."
            )
        if table.job is not first.job:
            raise ValueError(
                "Tables of different jobs cannot be used together. Received: "
                f"'{first.table_name}' of {first.job!r}, '{table.table_name}' of {table.job!r}."
            )
    return first.job
