"""From the tables of all workers into files, which one worker writes, piece by piece."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from sok.base.progress import Progress, on_stderr
from sok.compat.formats import columns
from sok.compat.formats.shard import Shard
from sok.compat.formats.writing import NewColumn, TableWriter
from sok.job import context
from sok.job.agreement import agree, attempt
from sok.job.job import job_of
from sok.job.transport.base import Transport
from sok.table.table import EmbeddingVariable


def plan(counts: Sequence[int], dim: int, in_turns: bool) -> np.ndarray:
    """Which rows each worker sends in each round: [rounds, R, 2] int64 of start and stop.

    Args:
        counts: rows of each worker.
        dim: floats in a row, which is all that SOK v2 counts.
        in_turns: as in `Dump`.

    Example:
        >>> plan([2, 1], 4, in_turns=True).tolist()
        [[[0, 2], [0, 1]]]
        >>> plan([2, 1], 4, in_turns=False).tolist()
        [[[0, 2], [0, 0]], [[0, 0], [0, 1]]]
    """
    step = max(1, columns.PIECE_BYTES // (4 * dim))
    cuts = [[(start, min(count, start + step)) for start in range(0, count, step)] for count in counts]
    if in_turns:
        rounds = [[cut[i] if i < len(cut) else (0, 0) for cut in cuts] for i in range(max(map(len, cuts)))]
    else:
        rounds = [
            [piece if other == rank else (0, 0) for other in range(len(cuts))]
            for rank, cut in enumerate(cuts)
            for piece in cut
        ]
    return np.array(rounds, np.int64).reshape(-1, len(cuts), 2)


class _Files(NamedTuple):
    """What this worker writes."""

    writer: TableWriter
    undo: weakref.finalize  # undoes a run that broke off, with the graph or the program
    shown: Progress


class Dump:
    """One table being written. Methods run when the graph does, on all workers.

    Args:
        shard: this worker's rows.
        new_columns: the files to write for that many rows; raises if there must not be so many. Called on all workers.
        obsolete: says, on the worker that writes, which old files go when the new ones come.
        in_turns: order of the rows in files. False: all rows of worker 0, then those of worker 1, ... True: a piece of
            each worker, then the next piece of each, as SOK v2 writes them. A shard of up to 64 MiB is one piece.
        show: progress; None: if standard error is a terminal.
    """

    def __init__(
        self,
        shard: Shard,
        new_columns: Callable[[int], list[NewColumn]],
        obsolete: Callable[[], list[str]] = list,
        in_turns: bool = False,
        show: bool | None = None,
    ) -> None:
        self.shard, self.name = shard, shard.variable.table_name
        self.writer = shard.variable.placement.writers(shard.variable.world_size)[0]
        self._new_columns, self._obsolete, self._in_turns, self._show = new_columns, obsolete, in_turns, show
        self._files: _Files | None = None
        self._error: Exception | None = None
        self._plan = np.zeros([0, 1, 2], np.int64)

    def begin(self, counts: np.ndarray) -> None:
        self.undo()  # what a run of this graph has left that broke off
        table = self.shard.variable
        writers = table.placement.writers(table.world_size)
        counts = np.where(np.isin(np.arange(len(counts)), writers), counts, 0)  # copies are of one worker alone
        total = int(counts.sum())
        if table.placement.cuts_rows:
            total = int(counts[self.writer])
            if (counts[writers] != total).any():
                raise RuntimeError(f"table '{self.name}' got new rows while it was being dumped.")
            sends = plan([total], table.dim, self._in_turns)  # all of them the columns of the same rows
            self._plan = np.where((counts > 0)[None, :, None], sends, 0)
        else:
            self._plan = plan(counts.tolist(), table.dim, self._in_turns)
        new_columns = self._new_columns(total)
        self._error = None
        if table.rank == self.writer:
            writer = TableWriter(new_columns, self._obsolete())
            shown = on_stderr(f"dump {self.name}", total, self._show)
            self._files = _Files(writer, weakref.finalize(self, writer.abort), shown)

    def rounds(self) -> np.ndarray:
        return self._plan

    def write(self, *arrays: np.ndarray) -> np.int64:
        if self._files is not None and self._error is None:
            try:
                self._files.writer.write(*arrays)
                self._files.shown.add(len(arrays[0]))
            except Exception as error:  # told by flush: peers wait in the next round now
                self._error = error
        return np.int64(0)

    def flush(self) -> None:
        if self._error is not None:
            raise self._error
        if self._files is not None:
            self._files.writer.flush()

    def commit(self) -> None:
        if self._files is not None:
            self._files.writer.commit()
            self._files.shown.close()
            self._files.undo.detach()
            self._files = None

    def undo(self) -> None:
        if self._files is not None:
            self._files.undo()
            self._files = None


def dump_tables(dumps: Sequence[Dump], name: str) -> tf.Tensor:
    """Writes all tables, or none. Builds the ops that do so, or executes them eagerly.

    Args:
        dumps: equal on all workers but for the rows.
        name: of the collectives.

    Returns:
        A scalar that is there when all files have their names.

    Raises:
        As `agree`. Files that were there before are then as they were.

    Collective.
    """

    def undo() -> None:
        for dump in dumps:
            dump.undo()

    transport = job_of([dump.shard.variable for dump in dumps]).transport
    sizes = tf.stack([tf.size(dump.shard.keys, tf.int64) for dump in dumps])
    counts = transport.all_gather(sizes[tf.newaxis], context.unique_collective_name(f"{name}/counts"))
    try:
        begun = attempt(lambda counts: _each(Dump.begin, dumps, counts), counts)
        ready = agree(transport, f"{name}/begin", begun, undo)
        # Nothing else keeps Python's functions in order inside a graph.
        for dump in dumps:
            with tf.control_dependencies([ready]):
                ready = _stream(dump, f"{name}/{dump.name}")
        with tf.control_dependencies([ready]):
            ready = agree(transport, f"{name}/flush", attempt(lambda: _each(Dump.flush, dumps)), undo)
    except BaseException:
        undo()
        raise
    with tf.control_dependencies([ready]):
        return agree(transport, f"{name}/commit", attempt(lambda: _each(Dump.commit, dumps)), undo)


def _each(method: Callable[..., None], dumps: Sequence[Dump], counts: np.ndarray | None = None) -> None:
    for place, dump in enumerate(dumps):
        method(dump, *([] if counts is None else [counts[:, place]]))


def _stream(dump: Dump, name: str) -> tf.Tensor:
    """Sends all rows to the worker that writes them, round by round. Gives a scalar that is there when that is done."""
    shard, table = dump.shard, dump.shard.variable
    job = table.job
    rounds = tf.ensure_shape(tf.numpy_function(dump.rounds, [], tf.int64), [None, None, 2])
    names = [context.unique_collective_name(f"{name}/column{c}") for c in range(2 + len(shard.slots))]

    def body(i: tf.Tensor) -> tuple[tf.Tensor]:
        start, stop = rounds[i, job.rank, 0], rounds[i, job.rank, 1]
        has_keys = not table.placement.cuts_rows or job.rank == dump.writer
        keys = shard.keys[start:stop] if has_keys else shard.keys[:0]
        parts = [shard.rows(start, stop), *(slot[start:stop] for slot in shard.slots)]
        there = [_send(job.transport, part, dump.writer, c) for part, c in zip([keys, *parts], names, strict=True)]
        there = [there[0], *(_rows(table, part) for part in there[1:])]
        written = tf.reshape(tf.numpy_function(dump.write, there, tf.int64), [])
        return (i + tf.cast(written, tf.int32) + 1,)

    (done,) = tf.while_loop(lambda i: i < tf.shape(rounds)[0], body, [tf.constant(0)], parallel_iterations=1)
    return done


def _rows(table: EmbeddingVariable, numbers: tf.Tensor) -> tf.Tensor:
    """Rows [n, D], of which each worker in turn has sent its columns."""
    if not table.placement.cuts_rows:
        return tf.reshape(numbers, [-1, table.dim])
    n, at, found = tf.size(numbers) // table.dim, 0, {}
    for rank in table.placement.writers(table.world_size):
        columns = table.placement.part_of(rank, table.dim, table.world_size).columns
        found[columns.start] = tf.reshape(numbers[at : at + n * len(columns)], [n, len(columns)])
        at += n * len(columns)
    return tf.concat([found[first] for first in sorted(found)], 1)


def _send(transport: Transport, part: tf.Tensor, to: int, name: str) -> tf.Tensor:
    """The numbers of all workers, on worker `to`; none on the others."""
    # Flat: what is a vector goes through shared memory where there is some.
    flat = tf.reshape(part, [-1])
    splits = tf.one_hot(to, transport.size, tf.size(flat), 0, dtype=tf.int32)
    received, _ = transport.all_to_all(flat, splits, name)
    return received
