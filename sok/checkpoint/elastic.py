"""Elastic jobs: workers come and go, and training goes on at the new size. On Horovod Elastic; docs/elastic.md."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import io
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from sok.base import _ops, log
from sok.base.errors import CheckpointError
from sok.base.types import PathLike
from sok.checkpoint import chains
from sok.checkpoint.arguments import optimizers_of
from sok.checkpoint.manifest import generation_after, make_folder
from sok.checkpoint.restoring import restore
from sok.checkpoint.saving import save
from sok.distributed.broadcast import broadcast_variables
from sok.job import context, dead_peers
from sok.job.agreement import check_equal, together
from sok.optimizers import Optimizer
from sok.table.placement import Placement
from sok.table.resharding import Move, move, moves_of
from sok.table.table import EmbeddingVariable, is_embedding_variable

T = TypeVar("T")

_PREFIX = "elastic-"


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
        **values: where the program is (`step=0, epoch=0`): attributes of the state, of what JSON can hold.

    Raises:
        ValueError: `tracked` holds no table, or one twice; a value has a name that the state needs.

    Making one is not collective. Workers that join make theirs, with tables and optimizers, while others train: between
    `sok.Init` and the function that `sok.elastic.run` has wrapped a program makes no collective calls.

    Example:
        >>> import sok
        >>> state = State("/tmp/saves", [sok.EmbeddingVariable(dim=2, capacity=10, name="of_state")], step=0)
        >>> state.step
        0
    """

    def __init__(
        self,
        path: PathLike,
        tracked: Sequence[Any],
        *,
        place: Callable[[EmbeddingVariable, int], Placement] | None = None,
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
        self.__dict__.update(values)
        self._token = ""  # of the job whose workers hold what they do together
        self._is_committed = False  # nothing has changed since the last commit

    def commit(self) -> None:
        """Saves what has changed since the last commit, and lets workers in that wait, and those out that are to go.

        After a worker is lost, all others go on from here: what they have done since is done again. Collective.
        Does not return where workers come or go: `sok.elastic.run` calls its function again.

        Raises:
            Exception: what `sok.save` raises.
        """
        self._save()
        self._is_committed = True
        transport = context.get_transport()
        told = together(transport, "sok/elastic/changes", lambda: transport.rank == 0 and context.are_changes())
        if any(told):
            raise _WorkersChanged
        self._is_committed = False

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _file(self, generation: str) -> str:
        # The number alone: it is known before the save, whose name is not.
        return os.path.join(self._path, f"{_PREFIX}{generation.partition('-')[0]}.npz")

    def _save(self) -> None:
        """Rows, dense weights and values of one step: the manifest of the rows says which of the others are valid."""
        transport = context.get_transport()

        def write() -> str | None:
            if transport.rank:
                return None
            make_folder(self._path)
            path = self._file(generation_after(chains.current(self._path)))
            content = io.BytesIO()
            arrays: dict[str, Any] = {f"v{i}": np.asarray(v) for i, v in enumerate(self._dense)}
            np.savez(content, values=np.array(json.dumps(self._values())), **arrays)
            with open(f"{path}.tmp", "wb") as file:
                file.write(content.getvalue())
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.tmp", path)
            return path

        kept = together(transport, "sok/elastic/dense", write)[0]
        save(self._path, self._tables, self._optimizers or None, incremental=True)
        if transport.rank == 0:
            for old in set(glob.glob(os.path.join(glob.escape(self._path), f"{_PREFIX}*"))) - {kept}:
                with contextlib.suppress(OSError):
                    os.unlink(old)

    def _restore(self) -> None:
        generation = restore(self._path, self._tables, self._optimizers or None, _give_generation=True)
        assert generation is not None

        def read() -> None:
            arrays, values = _read(self._file(generation), len(self._dense))
            _assign(self._dense, arrays, self._path)
            self.__dict__.update(values)

        together(context.get_transport(), "sok/elastic/restored", read)

    # What `run` does between two calls of its function.

    def _sync(self) -> None:
        """Brings all workers to one step: in memory if all that the job held is there, else from the last commit."""
        job = context.get_job()
        said = [_Hello(*one) for one in together(job.transport, "sok/elastic/hello", self._hello)]
        check_equal([one.names for one in said], "sok.elastic: [[table, dim], number of dense variables]")
        held = [rank for rank, one in enumerate(said) if one.token]
        root = held[0] if held else 0
        there = {said[rank].rank for rank in held if said[rank].token == said[root].token}
        lacking = set(range(said[root].size)) - there
        self._is_committed = False  # until all is done
        placements = self._placements(said[root])
        if held and not lacking and all(said[rank].is_committed for rank in held):
            self._move(placements, root, said)
            how = "in memory"
        elif said[0].has_save:
            self._empty(placements)
            self._restore()
            how = f"from {self._path}"
        elif held:
            raise RuntimeError(
                f"A worker is lost, and {self._path} holds no commit of this job any more, from which to go on."
            )
        else:
            self._start(placements, said)
            self.__dict__.update(said[0].values)
            self._save()
            how = "as it was made"
        self._token, self._is_committed = said[root].proposal, True
        log.logger.info("%d workers go on %s: %r.", job.size, how, self._values())

    def _start(self, placements: Sequence[Placement], said: Sequence[_Hello]) -> None:
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
            [[[t.table_name, t.dim] for t in self._tables], len(self._dense)],
            [t.placement.get_config() for t in self._tables],
            self._values(),
            context.rank() == 0 and self._has_save(),
            secrets.token_hex(8),
            is_of_before,
            sum(int(_ops.lib().sok_table_size(t.handle)) for t in self._tables) if is_of_before else 0,
        ]

    def _has_save(self) -> bool:
        manifest = chains.current(self._path)
        return manifest is not None and os.path.exists(self._file(manifest.generation))

    def _placements(self, of_root: _Hello) -> list[Placement]:
        size = context.size()
        before = [Placement.from_config(config) for config in of_root.placements]
        found = [
            self._place(table, size) if self._place is not None else _fitting(placement, size)
            for table, placement in zip(self._tables, before, strict=True)
        ]
        for table, placement in zip(self._tables, found, strict=True):
            placement.check(size, table.hashed, table.dim)
        return found

    def _moves(self, placements: Sequence[Placement]) -> list[Move]:
        job, pairs = context.get_job(), zip(self._tables, placements, strict=True)
        return [one for table, placement in pairs for one in moves_of(table, placement, job)]

    def _move(self, placements: Sequence[Placement], root: int, said: Sequence[_Hello]) -> None:
        transport, moves = context.get_transport(), []
        moves = _done(transport, lambda: self._moves(placements))
        if not self._token:  # it is new, and has nothing
            moves = [dataclasses.replace(one, before=None, is_sent=False, counts=False) for one in moves]
        move(moves, transport)
        self._broadcast(root)
        self.__dict__.update(said[root].values)

    def _empty(self, placements: Sequence[Placement]) -> None:
        """Tables of this job, without rows."""
        for one in _done(context.get_transport(), lambda: self._moves(placements)):
            _ops.lib().sok_table_succeed(one.shards.handle, one.before, tf.zeros([3], tf.int64))
            one.table.move_to(one.shards)

    def _broadcast(self, root: int) -> None:
        broadcast_variables([*self._dense, *self._counters], root)


@dataclasses.dataclass(frozen=True)
class _Hello:
    """What a worker says of itself when a job begins."""

    token: str
    is_committed: bool
    size: int
    rank: int
    names: list[Any]
    placements: list[dict[str, Any]]
    values: dict[str, Any]
    has_save: bool
    proposal: str
    is_of_before: bool  # its tables are of a job that has ended
    rows_before: int  # that these hold


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
    the last commit. Workers that join, or are taken away, do so at a commit, and nothing is done twice.

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
                return function(state, *args, **kwargs)
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


def _fitting(placement: Placement, size: int) -> Placement:
    """A placement, with ranks that are not there taken modulo the number of workers."""
    config = placement.get_config()
    if config.get("owner") is not None:
        config["owner"] %= size
    if config.get("owners") is not None:
        config["owners"] = [owner % size for owner in config["owners"]]
    return Placement.from_config(config)


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


def _assign(variables: Sequence[Any], arrays: Sequence[np.ndarray], path: str) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        if tuple(variable.shape) != array.shape:
            raise ValueError(f"A dense variable has shape {tuple(variable.shape)}; in {path} it has {array.shape}.")
        variable.assign(array)


def _read(path: str, num_dense: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return [content[f"v{i}"] for i in range(num_dense)], json.loads(str(content["values"]))
    except (OSError, KeyError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: the dense weights of this commit cannot be read: {error}") from error
