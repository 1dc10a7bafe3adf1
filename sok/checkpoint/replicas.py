"""Rows of each worker in the memory of a neighbour: commits of `sok.elastic` without files. docs/design/elastic.md."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.checkpoint.replica_pieces import Piece, Reading
from sok.job import dead_peers
from sok.job.agreement import together
from sok.job.job import Job
from sok.job.servers import ShardTransport
from sok.job.transport.base import Transport
from sok.table.counted import with_counted
from sok.table.resharding import Source, moves_of, source_of
from sok.table.shards import Shards
from sok.table.table import EmbeddingVariable


def keepers(hosts: Sequence[str]) -> list[int]:
    """Which rank keeps the rows of each: another one, on another host as often as that can be.

    Args:
        hosts: of each rank, at least two.

    Each keeps those of one. With the workers in the order of their hosts, that is the one as many places further as the
    largest host has workers: of a host with at most half of all workers none lands on it again.

    Example:
        >>> keepers(["a", "a", "a"]), keepers(["a", "a", "b", "b"])
        ([1, 2, 0], [2, 3, 0, 1])
    """
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    most = max(map(hosts.count, hosts))
    shift = 1 if most == len(hosts) else most
    found = [0] * len(hosts)
    for place, rank in enumerate(order):
        found[rank] = order[(place + shift) % len(order)]
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Commit:
    """What all workers hold alike of a commit.

    Args:
        number: it rises from commit to commit.
        token: of the attempt: another one of this number has another.
        common: all but rows.
    """

    number: int
    token: str
    common: dict[str, Any]

    @property
    def name(self) -> str:
        return f"sok/replica/{self.number}-{self.token}"


class Replica:
    """What the shards of one worker held at a commit, in native tables beside those that train.

    Args:
        tables: with what is counted of keys without rows by the table itself.
        rank: of the worker.
        size: of its job.
    """

    def __init__(self, tables: Sequence[EmbeddingVariable], rank: int, size: int) -> None:
        self.rank = rank
        job = Job(ShardTransport(rank, size), seed=tables[0].job.seed)
        with tf.device("/CPU:0"):
            moves = [one for table in tables for one in moves_of(table, table.placement, job, table.capacity)]
        self.tables: list[EmbeddingVariable] = [one.table for one in moves]
        self.shards: list[Shards] = [one.shards for one in moves]
        self._sources = [source_of(one.table, rank, one.shards.handle) for one in moves]
        self._sets = [b""] * len(moves)
        self._counts = [source.stats is None for source in self._sources]
        self.num_bytes = 0  # that were taken

    def take(self, piece: Piece, save: str) -> None:
        """Changes as the worker's shard has. `save`: names the commit, for which what sets have missed counts once."""
        lib, place = _ops.lib(), piece.table
        handle, dtype = self.shards[place].handle, self.tables[place].key_dtype
        self.num_bytes += piece.num_bytes
        if piece.sets is not None:
            self._sets[place] = piece.sets
            lib.sok_table_take_sets(handle, piece.sets, piece.base, save)
            lib.sok_table_set_step(handle, tf.constant(piece.step, tf.int64))
            if piece.rows > int(lib.sok_table_size(handle)):  # at once, so that the index is not built over and over
                lib.sok_table_reserve(handle, tf.constant(piece.rows, tf.int64), keys_only=True)
            if self._counts[place]:
                self._sources[place] = dataclasses.replace(self._sources[place], stats=piece.stats)
        if len(piece.erased):
            (lib.sok_table_note_erased if piece.is_whole else lib.sok_table_erase)(
                handle, tf.constant(piece.erased, dtype)
            )
        if len(piece.keys):
            no_columns = tf.zeros([0], tf.int64)
            keys = tf.constant(piece.keys, dtype)
            lib.sok_table_store_keys(handle, self._sets[place], keys, piece.values, piece.changed, no_columns)

    def sources(self) -> list[Source]:
        """For `sok.table.resharding.move`: of each table, in the order of `tables`."""
        return self._sources

    def begin_from(self, bases: Sequence[str]) -> None:
        """Counts changes from these saves from now on."""
        for shards, base in zip(self.shards, bases, strict=True):
            _count_from(shards.handle, base)

    def bases(self) -> list[str]:
        """The saves that changes are counted from."""
        return [_base(shards.handle) for shards in self.shards]

    def as_tables(self) -> list[EmbeddingVariable]:
        """What `sok.save` takes for the tables: it writes these rows then."""
        views = {id(table): _view(table, shards) for table, shards in zip(self.tables, self.shards, strict=True)}
        for view in views.values():
            if "_counted" in vars(view):
                view._counted = views[id(view._counted)]
        counted = {id(view._counted) for view in views.values() if "_counted" in vars(view)}
        return [view for view in views.values() if id(view) not in counted]


@dataclasses.dataclass(eq=False)
class _Held:
    """A commit, with the rows that this worker keeps of it."""

    commit: Commit
    own: Replica
    kept: Replica


@dataclasses.dataclass(eq=False)
class _Staged:
    """A commit that is not agreed upon, as what has changed since the one before."""

    commit: Commit
    own: list[Piece]
    kept: list[Piece]


class Replicas:
    """What this worker keeps of the last commit: its own rows, those of a neighbour, and what all hold alike.

    Args:
        tables: of a job of several workers, on the CPU.
        transport: of that job.
        hosts: of each rank.
    """

    def __init__(self, tables: Sequence[EmbeddingVariable], transport: Transport, hosts: Sequence[str]) -> None:
        self._given, self._transport = list(tables), transport
        self._tables = [one for table in tables for one in with_counted({table.table_name: table}).values()]
        self._handles: list[tf.Tensor] = []
        found = keepers(hosts)
        self.keeper, self.kept_rank = found[transport.rank], found.index(transport.rank)
        self._now: _Held | None = None
        self._next: _Held | _Staged | None = None
        self.bytes_sent = 0  # by the last commit

    def commit(self, number: int, common: dict[str, Any], then: Callable[[], Any] = lambda: None) -> list[Any]:
        """Hands what has changed to the neighbour. Counts once all hold it; the former is kept until then. Collective.

        Args:
            number: of the commit.
            common: what all hold alike beside rows.
            then: called once it counts, on each rank.

        Returns:
            What `then` has given on each rank.

        Raises:
            Exception: what is wrong on a worker, on all; then the former commit is the last one.
        """
        transport = self._transport
        try:
            readings: list[Reading] = []
            said = together(transport, "sok/elastic/changed", lambda: self._read_changes(readings))
            is_whole = any(needs_all for _, _, needs_all in said)
            if is_whole:
                said = together(transport, "sok/elastic/read", lambda: self._read(True, readings))
            made = Commit(number, said[0][1], common)
            taken = self._fresh(made) if is_whole else _Staged(made, [], [])
            error = self._pass_on(readings, max(count for count, *_ in said), taken)
            self._next = taken if error is None else None

            def check() -> None:
                if error is not None:
                    raise error

            together(transport, "sok/elastic/held", check)

            def keep() -> Any:
                self._promote()
                return then()

            return together(transport, "sok/elastic/kept", keep)
        except BaseException as caught:
            # If a peer is lost, others may hold it, and all go on from it.
            if not isinstance(caught, Exception) or not dead_peers.is_from_dead_peer(caught):
                self._next = None
            raise

    def holds(self) -> list[list[Any]]:
        """The commits that it has rows of: of each [number, token, number of workers, ranks whose rows]."""
        found = [one.commit for one in (self._now, self._next) if one is not None]
        ranks = [self._transport.rank, self.kept_rank]
        return [[one.number, one.token, self._transport.size, ranks] for one in found]

    def go_to(self, token: str) -> tuple[Commit, dict[int, Replica]]:
        """A commit that it holds, and by rank what it has of its rows. The other one is forgotten."""
        if self._next is not None and self._next.commit.token == token:
            self._promote()
        self._next = None
        assert self._now is not None and self._now.commit.token == token
        return self._now.commit, {one.rank: one for one in (self._now.own, self._now.kept)}

    def as_tables(self) -> list[EmbeddingVariable]:
        """Its own rows of the last commit, for `sok.save`: the tables may train meanwhile."""
        assert self._now is not None
        return self._now.own.as_tables()

    def note_save(self, tables_too: bool) -> None:
        """The last commit was saved from `as_tables`: later changes are counted from that; `tables_too`: of tables."""
        assert self._now is not None
        bases = self._now.own.bases()
        self._now.kept.begin_from(bases)
        if tables_too:
            for table, base in zip(self._tables, bases, strict=True):
                _count_from(table.handle, base)

    def _read_changes(self, readings: list[Reading]) -> list[Any]:
        """As `_read`, and whether all rows are needed: there is no commit, or others have saved or moved rows since."""
        bases = {_base(table.handle) for table in self._tables}
        handles = [table.handle for table in self._tables]
        are_there = len(handles) == len(self._handles) and all(map(operator.is_, handles, self._handles))
        is_known = self._now is not None and bases == {self._now.commit.name} and are_there
        self._handles = handles  # held, so that no other can be taken for one of them
        for table in self._tables:  # what has changed belongs to this commit
            _ops.lib().sok_table_save_begin(table.handle, snapshot="")
        return [*(self._read(False, readings) if is_known else [0, ""]), not is_known]

    def _read(self, is_whole: bool, readings: list[Reading]) -> list[Any]:
        """What this worker has for a commit: how many pieces, and a token."""
        readings[:] = [Reading.of(place, table, is_whole) for place, table in enumerate(self._tables)]
        return [sum(one.num_pieces for one in readings), secrets.token_hex(8)]

    def _fresh(self, made: Commit) -> _Held:
        own, kept = (
            Replica(self._given, rank, self._transport.size) for rank in (self._transport.rank, self.kept_rank)
        )
        return _Held(made, own, kept)

    def _pass_on(self, readings: list[Reading], rounds: int, taken: _Held | _Staged) -> Exception | None:
        """Sends all pieces to the neighbour, and takes those of another. Gives what went wrong here; peers go on."""
        transport, name, self.bytes_sent = self._transport, taken.commit.name, 0
        error: Exception | None = None
        nothing = np.zeros([0], np.uint8)

        def attempt(part: Callable[[], Any]) -> Any:
            nonlocal error
            if error is None:
                try:
                    return part()
                except Exception as caught:
                    error = caught
            return nothing

        def own(pieces: Iterator[Piece]) -> np.ndarray:
            piece = next(pieces, None)
            if piece is None:
                return nothing
            taken.own.take(piece, name) if isinstance(taken, _Held) else taken.own.append(piece)
            return piece.to_bytes()

        def take(came: np.ndarray) -> None:
            piece = Piece.from_bytes(came)
            taken.kept.take(piece, name) if isinstance(taken, _Held) else taken.kept.append(piece)

        pieces = (piece for reading in readings for piece in reading.pieces())
        for _ in range(rounds):
            sent = attempt(lambda: own(pieces))
            counts = np.zeros([transport.size], np.int32)
            counts[self.keeper] = len(sent)
            self.bytes_sent += len(sent)
            came, _ = transport.all_to_all(tf.constant(sent), tf.constant(counts), "sok/elastic/pieces")
            if len(came):
                attempt(functools.partial(take, came.numpy()))
        return error

    def _promote(self) -> None:
        """What is staged is the last commit."""
        made, now = self._next, self._now
        assert made is not None
        self._now = None  # what is half done is no commit
        if isinstance(made, _Held):
            now = made
        else:
            assert now is not None
            for replica, pieces in ((now.own, made.own), (now.kept, made.kept)):
                for piece in pieces:
                    replica.take(piece, made.commit.name)
            now.commit = made.commit
        for table in self._tables:
            _ops.lib().sok_table_save_end(table.handle, made.commit.name)
        self._now, self._next = now, None


def _base(handle: tf.Tensor) -> str:
    base: str = json.loads(_ops.lib().sok_table_changes(handle).numpy())["base"]
    return base


def _count_from(handle: tf.Tensor, base: str) -> None:
    _ops.lib().sok_table_save_begin(handle, snapshot="")
    _ops.lib().sok_table_save_end(handle, base)


def _view(table: Any, shards: Shards) -> Any:
    """A table, as it would be with these shards."""
    view = object.__new__(type(table))
    for noted, nothing in (("_optimizers", list), ("_unclaimed_slots", dict)):  # sok/optimizers/claims.py
        vars(table).setdefault(noted, nothing())  # so that the view has the same one
    vars(view).update(vars(table))
    vars(view).update(_handle=shards.handle, _part_handles=shards.handles, _attributes=shards.attributes)
    return view
