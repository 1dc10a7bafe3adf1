"""`reshard`: tables get another placement, in memory. Also for the workers of another job: see `move`."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops, log
from sok.job.agreement import check_equal, together
from sok.job.job import Job, job_of
from sok.job.transport.base import Transport
from sok.table import on_servers, rules
from sok.table import state as table_state
from sok.table.counted import with_counted
from sok.table.options import whole_number
from sok.table.placement import Placement
from sok.table.shards import Shards
from sok.table.table import EmbeddingVariable, checked_table, reshard_with

PIECE_BYTES = 1 << 22
"""Of rows that a worker reads and sends at a time, slots included."""


def reshard(
    tables: EmbeddingVariable | Sequence[EmbeddingVariable], placement: Placement, capacity: int | None = None
) -> None:
    """Gives tables another placement, in memory and on the same workers.

    Afterwards they hold what `sok.save` and `sok.restore` into tables of that placement would give: rows with all
    slots, what policies have counted, steps, and what has changed since the last save, so that the next incremental
    save goes on. Training goes on as if the placement had been that from the start. If anything is wrong, an error is
    raised on all workers and no table has changed on any. Gradients of lookups from before are ignored.

    Functions that were traced before refuse the tables: call `tf.function` anew; of a Keras model call `compile`.

    Args:
        tables: an embedding variable, or several, of tables on the CPU.
        placement: as `sok.TableOptions` takes it.
        capacity: rows that a worker's shard may hold then. None: as before. Tables whose keys are row numbers have room
            for all of them, wherever they are.

    Raises:
        ValueError: the placement does not go with a table, its policies, constraints or optimizers; workers disagree;
            a table is on a GPU.
        RuntimeError: inside a tf.function, in a v1 graph, or a table is of a job that has ended.
        tf.errors.FailedPreconditionError: an asynchronous save of a table is under way.
        tf.errors.ResourceExhaustedError: a worker's shard has no room for its rows.

    Collective. Old rows and new ones are in memory at the same time, and on their way 4 MiB of them a worker.

    Example:
        >>> import sok
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="moves", initializer="ones")
        >>> table.assign([7], [[1.0, 2.0]])
        >>> reshard(table, sok.row_wise(hash=True))
        >>> table.placement, table.sparse_read([7]).numpy().tolist()
        (row_wise(hash=True), [[1.0, 2.0]])
    """
    chosen = [checked_table(t, "tables", "embedding variables") for t in _listed(tables)]
    if not chosen:
        raise ValueError("`tables` holds no embedding table.")
    if len({id(table) for table in chosen}) < len(chosen):
        raise ValueError("`tables` names one table twice.")
    job = job_of(chosen)
    moves: list[Move] = []

    def plan() -> list[Any]:
        _check(chosen, placement, capacity)
        for table in chosen:
            moves.extend(moves_of(table, placement, job, capacity))
        return [[one.name, repr(placement), capacity] for one in moves]

    check_equal(together(job.transport, "sok/reshard/plan", plan), "sok.reshard: [table, placement, capacity]")
    move(moves, job.transport)
    log.logger.info("Tables %s lie as %r now.", ", ".join(t.table_name for t in chosen), placement)


reshard_with(reshard)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Rows of a table that a worker brings to where they are to be.

    Args:
        handle: of the native table that has them.
        columns: which of a row's those have.
        is_sent: whether this worker sends them: of copies one does.
        stats: what policies have made, refused and evicted, as far as it counts for all (`counts_for_all`). None: what
            the native table has counted.
    """

    handle: tf.Tensor
    columns: range
    is_sent: bool
    stats: tuple[int, int, int] | None = None


@dataclasses.dataclass(eq=False)
class Move:
    """Of one table: where its rows are, and where they go.

    Args:
        name: as files call it.
        table: which then lies there.
        shards: where rows go: empty ones.
        before: the handle of what the table is now; None: that has nothing, as the worker is new.
        sources: what this worker brings: the rows that it holds, or copies of its own and of others.
    """

    name: str
    table: EmbeddingVariable
    shards: Shards
    before: tf.Tensor | None
    sources: tuple[Source, ...] = ()


def moves_of(table: EmbeddingVariable, placement: Placement, job: Job, capacity: int | None = None) -> list[Move]:
    """Those that bring a table, and what it counts of keys without rows, from where it is to a placement in `job`."""
    num_keys = table.num_keys
    if num_keys is not None:
        capacity = placement.share(num_keys, job.size)
    options = dataclasses.replace(table.options, placement=placement, num_keys=num_keys)
    shards = Shards.make(table, options, job, capacity or table.capacity)
    found = []
    for name, one in with_counted({table.table_name: table}).items():
        if one is not table:  # it belongs to the table where that will be
            its = dataclasses.replace(one.options, placement=placement)
            counted = functools.partial(_ops.lib().sok_table_counted, shards.handle)
            to = Shards.make(one, its, job, one.capacity, lambda counted=counted, **_: counted())
        else:
            to = shards
        found.append(Move(name, one, to, one.handle, (source_of(one, one.rank, one.handle),)))
    return found


def source_of(table: EmbeddingVariable, rank: int, handle: tf.Tensor) -> Source:
    """The rows of a worker's shard of a table, as it is placed now, which lie in a native table."""
    writers = table.placement.writers(table.world_size)
    counts = rank in writers[: 1 if table.placement.cuts_rows else None]
    columns = table.placement.part_of(rank, table.dim, table.world_size).columns
    return Source(handle, columns, rank in writers, None if counts else (0, 0, 0))


def stats_of(handle: tf.Tensor) -> tuple[int, int, int]:
    """What policies have made, refused and evicted in a native table."""
    made, refused, evicted = _ops.lib().sok_table_stats(handle).numpy().tolist()[2:5]
    return made, refused, evicted


def move(moves: Sequence[Move], transport: Transport) -> None:
    """Brings all rows where they are to be, and has the tables lie there. If anything fails, nothing has changed.

    Collective: all ranks have moves of the same tables, in the same order.
    """
    begun: list[Source] = []

    def describe() -> list[Any]:
        found = []
        for one in moves:
            for source in one.sources:
                _ops.lib().sok_table_save_begin(source.handle, snapshot="")
                begun.append(source)
            found.append([_described(source) for source in one.sources])
        return found

    def put_back() -> None:
        for source in begun:
            with contextlib.suppress(tf.errors.OpError):
                _ops.lib().sok_table_save_end(source.handle, "")

    try:
        said = together(transport, "sok/reshard/describe", describe)
        errors: list[Exception] = []
        for place, one in enumerate(moves):
            of_ranks = [[_Described(*source) for source in of_rank[place]] for of_rank in said]
            base = _base([source for of_rank in of_ranks for source in of_rank])
            for number in range(max(map(len, of_ranks))):
                source = one.sources[number] if number < len(one.sources) else None
                now = [of_rank[number] if number < len(of_rank) else _Described() for of_rank in of_ranks]
                _Carrier(one, source, transport, now, base, errors).run()

        def check() -> None:
            if errors:
                raise errors[0]

        together(transport, "sok/reshard/moved", check)
    except BaseException:
        put_back()
        raise
    for place, one in enumerate(moves):
        _take_place(one, [_Described(*source) for of_rank in said for source in of_rank[place]], transport)


def _listed(tables: Any) -> list[Any]:
    return list(tables) if isinstance(tables, list | tuple) else [tables]


def _are_eager(tables: Sequence[EmbeddingVariable]) -> bool:
    return tf.executing_eagerly() and not any(table._in_graph_mode for table in tables)


def _check(tables: Sequence[EmbeddingVariable], placement: Any, capacity: Any) -> None:
    """What is known before anything is done."""
    if not _are_eager(tables):
        raise RuntimeError(
            "Call sok.reshard outside of tf.function. In v1 graphs it is not possible: their ops keep their places."
        )
    if not isinstance(placement, Placement):
        raise ValueError(f"`placement` must be a placement, as sok.row_wise(). Received: {placement!r}.")
    if capacity is not None:
        whole_number("capacity", capacity, 2**32 - 2)
    for table in tables:
        on_servers.refuse(table, "sok.reshard", "Use sok.save, make it with the other placement, and sok.restore.")
        if "GPU" in (table.handle.device or ""):
            raise ValueError(
                f"Table '{table.table_name}' is on a GPU, where tables keep their placement. Use sok.save, make it "
                "with the other placement, and sok.restore."
            )
        if table.num_keys is not None and capacity is not None:
            raise ValueError(
                f"`capacity` is for hashed tables: the shards of '{table.table_name}' have room for all of its "
                f"{table.num_keys:,} row numbers. Received: {capacity}."
            )
        placement.check(table.world_size, table.hashed, table.dim)
        if not placement.cuts_rows:
            continue
        if table.row_terms is not None:
            table.row_terms.check_cut()
        for slots in table_state.slot_sets(table):
            if rules.find(slots.rule).needs_whole_row:
                raise ValueError(
                    f"Table '{table.table_name}' is trained by '{slots.rule}', by whose rule the step of a weight "
                    f"depends on the others of its row, and {placement} cuts rows."
                )


@dataclasses.dataclass(frozen=True)
class _Described:
    """What a worker says of a source; as a list, of what JSON can hold."""

    sets: str = ""  # slot sets, in base 64
    floats: int = 0  # of a row with its slots
    rows: int = 0
    first: int = 0  # column
    stop: int = 0
    step: int = 0
    base: str = ""  # the save that changes are counted from
    steps: dict[str, Any] = dataclasses.field(default_factory=dict)  # of slot sets that decay, since then
    stats: tuple[int, ...] = (0, 0, 0)
    is_there: bool = False


def _described(source: Source) -> list[Any]:
    lib, table = _ops.lib(), source.handle
    changes = json.loads(lib.sok_table_changes(table).numpy())
    sets, floats = lib.sok_table_sets(table)
    said = _Described(
        base64.b64encode(sets.numpy()).decode(),
        int(floats),
        int(lib.sok_table_size(table)) if source.is_sent else 0,
        source.columns.start,
        source.columns.stop,
        int(lib.sok_table_step(table)),
        changes["base"] if changes["on"] and changes["fits"] else "",
        changes["steps"],
        stats_of(table) if source.stats is None else source.stats,
        True,
    )
    return list(vars(said).values())


def _base(said: Sequence[_Described]) -> str:
    """The save from which changes are counted afterwards, too; empty: the next save writes all rows."""
    steps: dict[str, Any] = {}
    for one in said:
        for slot_set, made in one.steps.items():
            if steps.setdefault(slot_set, made) != made:
                return ""
    bases = {one.base for one in said}
    return bases.pop() if len(bases) == 1 else ""


class _Carrier:
    """Brings the rows of one source, piece by piece. An error of this rank is kept in `errors`, as peers go on."""

    def __init__(
        self,
        one: Move,
        source: Source | None,
        transport: Transport,
        said: list[_Described],
        base: str,
        errors: list[Exception],
    ) -> None:
        self._one, self._source, self._transport, self._errors = one, source, transport, errors
        self._said, self._base = said, base
        self._mine = self._said[transport.rank]
        self._sets = [base64.b64decode(of_rank.sets) for of_rank in self._said]
        self._dtype = one.table.key_dtype
        self._name = f"sok/reshard/{one.name}"
        placement, size = one.shards.options.placement, one.shards.job.size
        self._columns = [placement.part_of(rank, one.table.dim, size).columns for rank in range(size)]

    def run(self) -> None:
        piece = [self._rows_of(of_rank) for of_rank in self._said]
        rounds = max(-(-of_rank.rows // n) for of_rank, n in zip(self._said, piece, strict=True))
        self._try(self._take_sets)
        keys = self._try(self._own_keys, self._no_keys())
        own = piece[self._transport.rank]
        for number in range(rounds):
            self._send(keys[number * own : (number + 1) * own])
        self._send_erased()

    def _take_sets(self) -> None:
        for sets, of_rank in zip(self._sets, self._said, strict=True):
            if of_rank.is_there:
                _ops.lib().sok_table_take_sets(self._one.shards.handle, sets, self._base, "sok/reshard")

    def _own_keys(self) -> np.ndarray:
        if self._source is None or not self._mine.rows:
            return self._no_keys()
        return _ops.lib().sok_table_keys(self._source.handle, key_dtype=self._dtype).numpy()

    def _rows_of(self, of_rank: _Described) -> int:
        copies = self._transport.size if self._goes_to_all() else 1
        return max(1, PIECE_BYTES // (4 * copies * max(1, of_rank.floats)))

    def _goes_to_all(self) -> bool:
        placement = self._one.shards.options.placement
        return placement.is_copied or placement.cuts_rows

    def _try(self, part: Callable[[], Any], instead: Any = None) -> Any:
        """What `part` gives, or `instead`: after an error nothing is done here but to take part in what others do."""
        if not self._errors:
            try:
                return part()
            except Exception as error:
                self._errors.append(error)
        return instead

    def _no_keys(self) -> np.ndarray:
        return np.zeros([0], self._dtype.as_numpy_dtype)

    def _places(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In which order keys are sent, with repeats, and how many to each rank."""
        placement, size = self._one.shards.options.placement, self._transport.size
        if not self._goes_to_all():
            owners = placement.owner_of(keys, size)
            return np.argsort(owners, kind="stable"), np.bincount(owners, minlength=size)
        mine = range(self._mine.first, self._mine.stop)
        takes = [
            placement.holds(rank, size) and max(its.start, mine.start) < min(its.stop, mine.stop)
            for rank, its in enumerate(self._columns)
        ]
        return np.tile(np.arange(len(keys)), sum(takes)), np.array(takes, np.int64) * len(keys)

    def _send(self, keys: np.ndarray) -> None:
        """Sends rows, and stores those that come."""
        floats, size = max(1, self._mine.floats), self._transport.size
        nothing = (
            self._no_keys(),
            np.zeros([0], np.int32),
            np.zeros([0, floats], np.float32),
            np.zeros([size], np.int64),
        )
        sent, changed, values, counts = self._try(lambda: self._read(keys) if len(keys) else nothing, nothing)
        keys_here, splits = self._exchange(sent, counts, "keys")
        changed_here, _ = self._exchange(changed, counts, "changed")
        values_here, _ = self._exchange(values.reshape(-1), counts * floats, "values")
        row, at = 0, 0
        for rank, n in enumerate(splits.tolist()):
            wide = n * max(1, self._said[rank].floats)
            rows, floats_of_rank = slice(row, row + n), slice(at, at + wide)
            if n:
                came = rank, keys_here[rows], values_here[floats_of_rank], changed_here[rows]
                self._try(functools.partial(self._store, *came))
            row, at = row + n, at + wide

    def _read(self, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        assert self._source is not None
        values, changed = _ops.lib().sok_table_read_keys(self._source.handle, tf.constant(keys, self._dtype))
        order, counts = self._places(keys)
        return keys[order], changed.numpy().astype(np.int32)[order], values.numpy()[order], counts

    def _store(self, rank: int, keys: np.ndarray, values: np.ndarray, changed: np.ndarray) -> None:
        came, here = range(self._said[rank].first, self._said[rank].stop), self._columns[self._transport.rank]
        first, stop = max(came.start, here.start), min(came.stop, here.stop)
        columns = [] if came == here else [len(came), first - came.start, first - here.start, stop - first]
        _ops.lib().sok_table_store_keys(
            self._one.shards.handle,
            self._sets[rank],
            tf.constant(keys, self._dtype),
            values.reshape(len(keys), -1),
            changed.astype(bool),
            tf.constant(columns, tf.int64),
        )

    def _send_erased(self) -> None:
        nothing = self._no_keys(), np.zeros([self._transport.size], np.int64)
        keys, counts = self._try(self._erased, nothing)
        came, _ = self._exchange(keys, counts, "erased")
        self._try(lambda: _ops.lib().sok_table_note_erased(self._one.shards.handle, tf.constant(came, self._dtype)))

    def _erased(self) -> tuple[np.ndarray, np.ndarray]:
        keys = self._no_keys()
        if self._source is not None and self._source.is_sent:
            keys = _ops.lib().sok_table_erased_keys(self._source.handle, key_dtype=self._dtype).numpy()
        order, counts = self._places(keys)
        return keys[order], counts

    def _exchange(self, array: np.ndarray, counts: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
        came, splits = self._transport.all_to_all(
            tf.constant(array), tf.constant(counts, tf.int32), f"{self._name}/{what}"
        )
        return came.numpy(), splits.numpy()


def _take_place(one: Move, said: Sequence[_Described], transport: Transport) -> None:
    """The table lies there from now on."""
    placement, size = one.shards.options.placement, one.shards.job.size
    sums = [sum(source.stats[i] for source in said) for i in range(3)]
    writers = placement.writers(size)
    counts = placement.is_copied or (transport.rank in writers if placement.cuts_rows else transport.rank == writers[0])
    handle = one.shards.handle
    if one.before is not None:
        _ops.lib().sok_table_succeed(handle, one.before, tf.constant(sums if counts else [0, 0, 0], tf.int64))
    _ops.lib().sok_table_set_step(handle, tf.constant(max((source.step for source in said), default=0), tf.int64))
    one.table.move_to(one.shards)
