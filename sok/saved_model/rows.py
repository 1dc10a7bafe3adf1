"""From the shards of all workers to a SavedModel, in bounded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import tensorflow as tf

from sok.base.graph_ops import run_now
from sok.base.types import Exportable
from sok.job.job import job_of
from sok.saved_model.frozen_table import StandsForTable, word_dtype
from sok.saved_model.native_table import NativeFiles
from sok.table.table import EmbeddingVariable

Freeze = Callable[[EmbeddingVariable], Any]

# Of float32 rows that travel and are written at a time; three or four copies of it exist at once.
PIECE_BYTES = 32 << 20


@dataclasses.dataclass
class RowsLoss:
    """How far written rows are from those of the table."""

    largest_error: float = 0.0
    sum_of_squared_errors: float = 0.0
    sum_of_squares: float = 0.0

    def add(self, rows: np.ndarray, written: np.ndarray) -> None:
        error = rows.astype(np.float64) - written
        self.largest_error = max(self.largest_error, float(np.abs(error).max(initial=0.0)))
        self.sum_of_squared_errors += float(np.square(error).sum())
        self.sum_of_squares += float(np.square(rows, dtype=np.float64).sum())

    @property
    def relative(self) -> float:
        """Root of the sum of the squared errors, over that of the squared values."""
        return float(np.sqrt(self.sum_of_squared_errors / self.sum_of_squares)) if self.sum_of_squares else 0.0


@dataclasses.dataclass(frozen=True)
class Written:
    """What became of one table."""

    num_rows: int
    num_bytes: int
    loss: RowsLoss


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The keys of a table, of all workers."""

    count: int  # at least 1: a table without keys has one that reads as unseen keys do
    words: np.ndarray | None  # on rank 0 their bits, sorted [count]; None of an identity table
    is_empty: bool = False
    failure: Exception | None = None  # of this worker; it has told nobody yet


class Writer(Protocol):
    """Takes the rows of one table from first to last; `num_bytes` is known when it is finished."""

    num_bytes: int

    def add(self, begin: int, values: dict[str, np.ndarray]) -> None:
        """Writes 'rows' [m, D], and 'scales' [m] of int8 ones, from row `begin` on."""

    def finish(self) -> None: ...

    def close(self) -> None:
        """In any case, also when writing failed."""


class Target(Protocol):
    """Where the rows of all tables go."""

    def writer(self, frozen: Any, num_rows: int, words: np.ndarray | None) -> Writer: ...

    def finish(self) -> None: ...


class Export(Protocol):
    """Signatures of a model in stock ops or, with `files`, in those of a native export, and what they need.

    `freeze` makes what stands for a table.
    """

    is_eager: ClassVar[bool]  # whether its models are read eagerly, outside of graphs
    names: tuple[str, ...]  # of the signatures
    tables: Sequence[Any]  # what stands for them
    # Of dense weights that saves name so, among the SavedModel's variables; None: it has some without such names.
    dense_places: dict[str, str] | None

    def __init__(self, model: Exportable, signatures: Any, freeze: Freeze, files: NativeFiles | None) -> None: ...

    @staticmethod
    def takes(model: object) -> bool:
        """Whether `model` is of this kind."""
        raise NotImplementedError

    def save(self, folder: str) -> Target:
        """Saves all but the rows of tables; gives what takes them."""

    def words(self, table: EmbeddingVariable) -> np.ndarray:
        """The bits of this worker's keys [n]."""

    def rows(self, table: EmbeddingVariable, keys: np.ndarray) -> np.ndarray:
        """The rows [n, D] of keys, of all workers. Collective."""


def write(
    export: Export, frozen: StandsForTable, target: Target | None, drop_zeros: bool = False
) -> tuple[Written, Exception | None]:
    """Writes all rows of a table; with drop_zeros those of a hashed one that are not zero. Collective.

    Only rank 0 writes, which alone has a target. An error of writing is given back, not raised: the other workers
    go on handing out rows until they are told.

    Raises:
        tf.errors.OpError: of the lookups, on all workers.
    """
    table, loss, writer = frozen.table, RowsLoss(), None
    keys = _hashed_keys(export, frozen) if table.num_keys is None else _Keys(table.num_keys, None)
    if drop_zeros and table.num_keys is None and not keys.is_empty:
        keys = _without_zeros(export, table, keys)
    failure = keys.failure
    step = _rows_at_a_time(table)
    try:
        for begin in range(0, keys.count, step):
            end = min(begin + step, keys.count)
            asked = _part(table, keys, begin, end) if target is not None and failure is None else np.zeros(0)
            rows = export.rows(table, asked.astype(table.key_dtype.as_numpy_dtype, copy=False))
            if target is None or not len(asked):
                continue
            try:
                if keys.is_empty and frozen.unseen_row is not None:
                    rows = frozen.unseen_row[None, :]
                values = narrowed(frozen.row_dtype, rows, table.table_name, begin)
                if frozen.row_dtype != tf.float32:
                    loss.add(rows, _widened(values))
                writer = writer or target.writer(frozen, keys.count, keys.words)
                writer.add(begin, values)
                if end == keys.count:
                    writer.finish()
            except Exception as error:  # also a full disk: the peers wait in the next lookup
                failure = error
    finally:  # also if a lookup raises
        if writer is not None:
            writer.close()
    num_bytes = writer.num_bytes if writer is not None and failure is None else 0
    return Written(0 if keys.is_empty else keys.count, num_bytes, loss), failure


def _hashed_keys(export: Export, frozen: StandsForTable) -> _Keys:
    table, failure = frozen.table, None
    try:
        words = export.words(table)
        placement, size = table.placement, table.world_size
        if placement.num_shards(size) == 1 and table.rank != placement.writers(size)[0]:
            words = words[:0]  # copies of the keys of another worker, or those of other columns
    except Exception as error:  # no memory for them, say: the peers wait for this worker's share
        words, failure = np.zeros(0, word_dtype(table).as_numpy_dtype), error
    transport, name = job_of([table]).transport, f"sok/{table.table_name}/export"
    if transport.size > 1:
        splits = [len(words), *[0] * (transport.size - 1)]
        words = run_now(lambda: transport.all_to_all(tf.constant(words), tf.constant(splits), f"{name}/keys")[0])
    count = int(run_now(lambda: transport.all_gather(tf.constant([len(words)], tf.int64), f"{name}/count"))[0])
    if count == 0:
        return _Keys(1, np.zeros(1, words.dtype), is_empty=True, failure=failure)
    try:
        return _Keys(count, frozen.sorted_keys(words), failure=failure)
    except MemoryError as error:  # the peers go on and ask for rows until they are told
        return _Keys(count, words, failure=error)


def _rows_at_a_time(table: EmbeddingVariable) -> int:
    return max(1, PIECE_BYTES // (4 * table.dim))


def _without_zeros(export: Export, table: EmbeddingVariable, keys: _Keys) -> _Keys:
    """The keys whose rows are not zero."""
    transport, step = job_of([table]).transport, _rows_at_a_time(table)
    is_asking, failure = transport.rank == 0 and keys.failure is None, keys.failure
    kept = [keys.words[:0]] if keys.words is not None else []
    for begin in range(0, keys.count, step):
        asked = _part(table, keys, begin, min(begin + step, keys.count)) if is_asking else np.zeros(0)
        rows = export.rows(table, asked.astype(table.key_dtype.as_numpy_dtype, copy=False))
        if is_asking and keys.words is not None:
            kept.append(keys.words[begin : begin + len(rows)][rows.any(axis=1)])
    words = np.concatenate(kept) if is_asking else keys.words
    mine = tf.constant([len(words) if is_asking and words is not None else keys.count], tf.int64)
    name = f"sok/{table.table_name}/export/kept"
    count = int(run_now(lambda: transport.all_gather(mine, name))[0])
    if count == 0 and keys.words is not None:
        return _Keys(1, np.zeros(1, keys.words.dtype), is_empty=True, failure=failure)
    return _Keys(max(1, count), words, is_empty=count == 0, failure=failure)


def _part(table: EmbeddingVariable, keys: _Keys, begin: int, end: int) -> np.ndarray:
    if keys.words is None:
        return np.arange(begin, end)
    return keys.words[begin:end].view(table.key_dtype.as_numpy_dtype)


def narrowed(dtype: tf.DType, rows: np.ndarray, table: str, begin: int) -> dict[str, np.ndarray]:
    """Rows [n, D] as they are stored.

    Raises:
        ValueError: a row has numbers for which that dtype has no room.
    """
    if dtype == tf.float32:
        return {"rows": rows}
    largest = np.abs(rows).max(1, initial=0.0)
    bad = np.flatnonzero(~(largest <= (np.finfo(np.float16).max if dtype == tf.float16 else np.finfo(np.float32).max)))
    if len(bad):
        raise ValueError(
            f"table '{table}': row {begin + int(bad[0])} of those in the order of their keys has a "
            f"number that {dtype.name} cannot hold ({largest[bad[0]]}). Export it as float32 (row_dtype=None)."
        )
    if dtype == tf.float16:
        return {"rows": rows.astype(np.float16)}
    scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return {"rows": np.rint(rows / scales[:, None]).astype(np.int8), "scales": scales}


def _widened(values: dict[str, np.ndarray]) -> np.ndarray:
    wide = values["rows"].astype(np.float32)
    return wide * values["scales"][:, None] if "scales" in values else wide
