"""Elastic jobs: workers come and go, and training goes on at the new size. On Horovod Elastic; docs/elastic.md."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from sok.base import _ops, log
from sok.base.types import PathLike
from sok.checkpoint import chains, elastic_files
from sok.checkpoint.arguments import optimizers_of
from sok.checkpoint.elastic_hello import Hello, InMemory, fitting, newest
from sok.checkpoint.manifest import generation_after, make_folder
from sok.checkpoint.replicas import Replica, Replicas
from sok.checkpoint.restoring import restore
from sok.checkpoint.saving import save
from sok.distributed.broadcast import broadcast_variables
from sok.job import context, dead_peers
from sok.job.agreement import check_equal, together
from sok.optimizers import Optimizer
from sok.table.options import whole_number
from sok.table.placement import Placement
from sok.table.resharding import Move, move, moves_of
from sok.table.table import EmbeddingVariable, is_embedding_variable

T = TypeVar("T")


class _WorkersChanged(BaseException):
    """`commit` goes back to `run`: workers are to come or to go."""


class State:
    """What an elastic job goes on from: tables, optimizers, dense variables, and where the program is in its data.

    Args:
        path: a folder that all workers see, for the saves. If a job has committed there before, this one goes on from
            that.
        tracked: tables, layers, models, optimizers and dense variables, built, the same on all workers in the same
            order.
        place: (table, number of workers) -> its placement among so many. None: the one it has; if that names ranks that
            are not there, these are taken modulo the number of workers.
        replicas: 1: a commit hands what has changed to a neighbour, which keeps it in memory, and writes no file. Rows
            take three times the memory then, and are on the CPU. 0: a commit is in files.
        save_every: with replicas, how many commits lie between two saves into files, at least 1. None: 10.
        **values: where the program is (`step=0, epoch=0`): attributes of the state, of what JSON can hold.

    Raises:
        ValueError: `tracked` holds no table, or one twice; a value has a name that the state needs; `replicas` is
            neither 0 nor 1, or a table is where there are none; `save_every` is out of range, or without replicas.

    Making one is not collective. Workers that join make theirs, with tables and optimizers, while others train: between
    `sok.Init` and the function that `sok.elastic.run` has wrapped a program makes no collective calls.

    Example:
        >>> import sok
        >>> state = State("/tmp/saves", [sok.EmbeddingVariable(dim=2, capacity=10, name="of_state")], step=0)
        >>> state.step, state.origin
        (0, '')
    """

    origin = ""
    """From where the function went on last: 'as made', 'in memory' (all rows were there), 'replicas' (a worker was
    gone), 'files'. Empty: it has not begun."""

    def __init__(
        self,
        path: PathLike,
        tracked: Sequence[Any],
        *,
        place: Callable[[EmbeddingVariable, int], Placement] | None = None,
        replicas: int = 0,
        save_every: int | None = None,
        **values: Any,
    ) -> None:
        taken = sorted(name for name in values if hasattr(type(self), name) or name.startswith("_"))
        if taken:
            raise ValueError(f"`values` must have other names: the state needs {taken[0]!r} for itself.")
        self._path, self._place, self._names = os.path.abspath(os.fspath(path)), place, tuple(values)
        variables = list({id(v): v for one in _flat(tracked) for v in _variables_of(one)}.values())
        self._tables: list[EmbeddingVariable] = [v for v in variables if is_embedding_variable(v)]
        if not self._tables:
            raise ValueError(
                f"`tracked` holds no embedding table. Layers make theirs when built. Received: {tracked!r}."
            )
        found = [o for one in _flat(tracked) if (o := _table_optimizer(one)) is not None]
        self._optimizers: list[Optimizer] = (optimizers_of(found, self._tables) or []) if found else []
        own = {id(v) for optimizer in self._optimizers for v in optimizer.variables}
        self._dense = [v for v in variables if not is_embedding_variable(v) and id(v) not in own]
        self._counters = [v for optimizer in self._optimizers for v in optimizer.variables]
        self._save_every = _checked_save_every(replicas, save_every, self._tables)
        self.__dict__.update(values)
        self._replicas: Replicas | None = None  # of a job of several workers
        self._number = 0  # of the last commit
        self._unsaved = 0  # commits since the last save into files
        self._token = ""  # of the job whose workers hold what they do together
        self._is_committed = False  # nothing has changed since the last commit

    def commit(self) -> None:
        """Keeps what has changed since the last commit, and lets workers in that wait, and those out that are to go.

        After a worker is lost, all others go on from here: what they have done since is done again. With `replicas` a
        neighbour keeps it, and every `save_every` commits, and where workers come or go, files do, too. Collective.
        Does not return where workers come or go: `sok.elastic.run` calls its function again.

        Raises:
            Exception: what `sok.save` raises.
        """
        told = self._keep(lambda: context.rank() == 0 and context.are_changes())
        if self._replicas is not None and self._unsaved >= self._save_every:
            self._save()
        self._is_committed = True
        if any(told):
            if self._replicas is not None:
                if self._unsaved:  # rows of workers that go, two neighbours maybe, are there then
                    self._save()
                self._replicas.note_save(tables_too=True)
            raise _WorkersChanged
        self._is_committed = False

    def _keep(self, then: Callable[[], bool] = lambda: False) -> list[bool]:
        """A commit: with a neighbour or in files. Gives what `then` has given afterwards on each worker."""
        self._number += 1
        self._unsaved += 1
        if self._replicas is not None:
            return self._hand_on(self._replicas, then)
        self._save()
        return together(context.get_transport(), "sok/elastic/changes", then)

    def _hand_on(self, replicas: Replicas, then: Callable[[], bool] = lambda: False) -> list[bool]:
        common = {
            "told": json.dumps(
                {
                    "values": self._values(),
                    "placements": [table.placement.get_config() for table in self._tables],
                    "unsaved": self._unsaved,
                }
            ),
            "variables": [np.array(v) for v in (*self._dense, *self._counters)],
        }
        return replicas.commit(self._number, common, then)

    def _finish(self) -> None:
        """The function has come to its end: what was not saved by then is."""
        if self._save_every:
            self._keep()
            if self._unsaved:
                self._save()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _save(self) -> None:
        """Rows, dense weights and values of one step: the manifest of the rows says which of the others are valid.

        To be called at a commit.
        """
        transport = context.get_transport()

        def write() -> str | None:
            if transport.rank:
                return None
            make_folder(self._path)
            path = elastic_files.path_of(self._path, generation_after(chains.current(self._path)))
            elastic_files.write(path, self._dense, self._values(), self._number)
            return path

        kept = together(transport, "sok/elastic/dense", write)[0]
        tables = self._tables if self._replicas is None else self._replicas.as_tables()
        save(self._path, tables, self._optimizers or None, incremental=True)
        if self._replicas is not None:
            self._replicas.note_save(tables_too=False)
        self._unsaved = 0
        if transport.rank == 0:
            elastic_files.remove_others(self._path, kept)

    def _restore(self) -> None:
        generation = restore(self._path, self._tables, self._optimizers or None, _give_generation=True)
        assert generation is not None

        def read() -> None:
            path = elastic_files.path_of(self._path, generation)
            arrays, values, _ = elastic_files.read(path, len(self._dense))
            elastic_files.assign(self._dense, arrays, self._path)
            self.__dict__.update(values)

        together(context.get_transport(), "sok/elastic/restored", read)

    # What `run` does between two calls of its function.

    def _sync(self) -> None:
        """Brings all workers to one step: in memory if all that the job held is there, else to the last commit."""
        job = context.get_job()
        said = [Hello(*one) for one in together(job.transport, "sok/elastic/hello", self._hello)]
        check_equal([one.names for one in said], "sok.elastic: [[table, dim], dense variables, save_every]")
        held = [rank for rank, one in enumerate(said) if one.token]
        root = held[0] if held else 0
        there = {said[rank].rank for rank in held if said[rank].token == said[root].token}
        lacking = set(range(said[root].size)) - there
        found = newest([one.holds for one in said])
        self._is_committed = False  # until all is done
        self._number = max(max(one.number, one.saved) for one in said)
        placements = self._placements(said[root].placements)
        if held and not lacking and all(said[rank].is_committed for rank in held):
            self._move(placements, root, said)
            self.origin, self._unsaved = "in memory", 0
        elif found is not None and found.number >= said[0].saved:
            self._move_replicas(found)
            self.origin = "replicas"
        elif said[0].saved >= 0:
            self._empty(placements)
            self._restore()
            self.origin, self._unsaved = "files", 0
        elif held:
            raise RuntimeError(
                f"A worker is lost, and {self._path} holds no commit of this job any more, from which to go on."
            )
        else:
            self._replicas = None
            self._start(placements, said)
            self.__dict__.update(said[0].values)
            self._save()
            self.origin = "as made"
        self._replicas = None
        if self._save_every and job.size > 1:
            self._number += 1
            self._replicas = Replicas(self._tables, job.transport, [one.host for one in said])
            self._hand_on(self._replicas)
        elif self._unsaved:
            self._save()
        self._token, self._is_committed = said[root].proposal, True
        log.logger.info("%d workers go on (%s): %r.", job.size, self.origin, self._values())

    def _start(self, placements: Sequence[Placement], said: Sequence[Hello]) -> None:
        """Nothing was trained or saved yet. But a worker may have been lost, so that tables are of a job before."""
        if any(one.rows_before for one in said):
            raise RuntimeError(
                "A worker is lost before the first commit, and tables held rows that only it may have had. Start the "
                "job anew."
            )
        if any(one.is_of_before for one in said):
            self._empty(placements)
        self._broadcast(0)

    def _hello(self) -> list[Any]:
        first = self._tables[0]
        is_of_before = first.job.has_ended
        return [
            self._token,
            self._is_committed,
            first.world_size,
            first.rank,
            [[[t.table_name, t.dim] for t in self._tables], len(self._dense), self._save_every],
            [t.placement.get_config() for t in self._tables],
            self._values(),
            self._saved_number() if context.rank() == 0 else -1,
            secrets.token_hex(8),
            is_of_before,
            sum(int(_ops.lib().sok_table_size(t.handle)) for t in self._tables) if is_of_before else 0,
            self._number,
            [] if self._replicas is None else self._replicas.holds(),
            os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        ]

    def _saved_number(self) -> int:
        """Of the commit in the files; -1: there is none."""
        manifest = chains.current(self._path)
        if manifest is None or not os.path.exists(file := elastic_files.path_of(self._path, manifest.generation)):
            return -1
        return elastic_files.read(file, 0)[2]

    def _placements(self, configs: Sequence[dict[str, Any]]) -> list[Placement]:
        """Those among the workers of now, from those that tables have had."""
        size = context.size()
        before = [Placement.from_config(config) for config in configs]
        found = [
            self._place(table, size) if self._place is not None else fitting(placement, size)
            for table, placement in zip(self._tables, before, strict=True)
        ]
        for table, placement in zip(self._tables, found, strict=True):
            placement.check(size, table.hashed, table.dim)
        return found

    def _moves(self, placements: Sequence[Placement]) -> list[Move]:
        job, pairs = context.get_job(), zip(self._tables, placements, strict=True)
        return [one for table, placement in pairs for one in moves_of(table, placement, job)]

    def _move(self, placements: Sequence[Placement], root: int, said: Sequence[Hello]) -> None:
        transport, moves = context.get_transport(), []
        moves = _done(transport, lambda: self._moves(placements))
        if not self._token:  # it is new, and has nothing
            moves = [dataclasses.replace(one, before=None, sources=()) for one in moves]
        move(moves, transport)
        self._broadcast(root)
        self.__dict__.update(said[root].values)

    def _move_replicas(self, found: InMemory) -> None:
        """Goes to a commit that workers hold, of which each brings what `found` says."""
        transport = context.get_transport()
        held: dict[int, Replica] = {}
        common: dict[str, Any] = {}

        def choose() -> str | None:
            if self._replicas is not None and any(token == found.token for _, token, *_ in self._replicas.holds()):
                commit, here = self._replicas.go_to(found.token)
                held.update(here)
                common.update(commit.common)
            return common.get("told")

        said = together(transport, "sok/elastic/replicas", choose)
        root = next(rank for rank, one in enumerate(said) if one is not None)
        told = json.loads(said[root])
        mine = [held[rank] for rank, worker in enumerate(found.workers) if worker == transport.rank]

        def plan() -> list[Move]:
            moves = self._moves(self._placements(told["placements"]))
            return [
                dataclasses.replace(
                    one,
                    before=one.before if self._token else None,
                    sources=tuple(replica.sources()[place] for replica in mine),
                )
                for place, one in enumerate(moves)
            ]

        move(_done(transport, plan), transport)
        self._replicas = None  # their rows are in tables again
        if common:
            for variable, array in zip((*self._dense, *self._counters), common["variables"], strict=True):
                variable.assign(array)
        self._broadcast(root)
        self.__dict__.update(told["values"])
        self._unsaved = told["unsaved"]

    def _empty(self, placements: Sequence[Placement]) -> None:
        """Tables of this job, without rows."""
        for one in _done(context.get_transport(), lambda: self._moves(placements)):
            _ops.lib().sok_table_succeed(one.shards.handle, one.before, tf.zeros([3], tf.int64))
            one.table.move_to(one.shards)

    def _broadcast(self, root: int) -> None:
        broadcast_variables([*self._dense, *self._counters], root)


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Has a function called anew, with its state where it was, whenever workers have come or gone.

    Args:
        function: called with a `State`, and what else is given. It makes its `tf.function`s itself: those of a job that
            has ended are refused. It commits now and then, and begins where the state says.

    Returns:
        The function to call, on all workers: after `sok.Init`, with the state. It gives what `function` returns.

    Raises:
        Exception: what `function` raises, unless that came from a worker that is gone.

    Started by `sok elastic`. After a worker is lost all others, and those that join, go on from
    the last commit; with `replicas`, if it was one of two neighbours and another is gone as well, from the last save in
    files. Workers that join, or are taken away, do so at a commit, and nothing is done twice. With `replicas` what the
    state holds when `function` returns is saved, too.

    Collective.

    Example: see docs/elastic.md.

    Source: `horovod.tensorflow.elastic.run`, whose state holds no tables, and whose errors are those of Horovod alone.
    """

    @functools.wraps(function)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> T:
        if not isinstance(state, State):
            raise TypeError(f"A function of sok.elastic.run takes a sok.elastic.State first. Received: {state!r}.")
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise RuntimeError(
                "This is an elastic job of horovodrun, whose launcher may wait for ever for workers that are gone. "
                "Start it by `sok elastic -np N --host-discovery-script FILE python ...` (docs/elastic.md)."
            )
        while True:
            try:
                state._sync()
                state._is_committed = False
                result = function(state, *args, **kwargs)
                state._finish()
                return result
            except _WorkersChanged:
                is_agreed = True
                log.logger.info("Workers come or go.")
            except Exception as error:
                if not dead_peers.is_from_dead_peer(error) or not context.is_elastic():
                    raise
                is_agreed = False
                log.logger.warning("A worker is gone; the others go on from the last commit.")
            context.rejoin(is_agreed)

    return wrapped


def _done(transport: Any, part: Callable[[], list[Move]]) -> list[Move]:
    made: list[Move] = []
    together(transport, "sok/elastic/moves", lambda: made.extend(part()))
    return made


def _flat(tracked: Any) -> list[Any]:
    return [part for one in tracked for part in _flat(one)] if isinstance(tracked, list | tuple) else [tracked]


def _variables_of(one: Any) -> list[Any]:
    if is_embedding_variable(one) or isinstance(one, tf.Variable) or not hasattr(one, "variables"):
        return [one]
    variables = one.variables() if callable(one.variables) else one.variables
    return list(variables)


def _table_optimizer(one: Any) -> Any:
    """It, if it trains tables."""
    inner = one if isinstance(one, Optimizer) else getattr(one, "embedding_optimizer", None)
    return one if isinstance(inner, Optimizer) else None


def _checked_save_every(replicas: Any, save_every: Any, tables: Sequence[EmbeddingVariable]) -> int:
    """How many commits lie between two saves into files; 0: every commit is one."""
    if isinstance(replicas, bool) or replicas not in (0, 1):
        raise ValueError(f"`replicas` must be 0 or 1: rows are kept by one neighbour. Received: {replicas!r}.")
    if not replicas:
        if save_every is not None:
            raise ValueError(f"`save_every` is for replicas=1: else each commit is saved. Received: {save_every!r}.")
        return 0
    for table in tables:
        if table.on_servers is not None or "GPU" in (table.handle.device or ""):
            where = "on parameter servers" if table.on_servers is not None else "on a GPU"
            raise ValueError(
                f"Table '{table.table_name}' is {where}, and `replicas` are of tables on the CPU. Leave them out: "
                "commits are in files then."
            )
    return 10 if save_every is None else whole_number("save_every", save_every, 2**31 - 1)
