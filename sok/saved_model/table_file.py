"""The file of a table of a native export, and the next one: the same rows, but for those that have changed."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.checkpoint.manifest import SavedTable
from sok.saved_model.feed_changes import Changes
from sok.saved_model.rows import PIECE_BYTES, narrowed
from sok.saved_model.serving_file import (
    KINDS,
    ROW_TYPES,
    Description,
    Head,
    ServingFile,
    mixed_keys,
    read_head,
    read_source,
    records_of,
    unmixed_keys,
)
from sok.table.initializers import InitializerSpec


class TableFile:
    """One that lies there. Its rows are read where they lie.

    Raises:
        OSError, DamagedFileError: of the file.
    """

    def __init__(self, path: str, has_keys: bool = True) -> None:
        self._path, self._head = path, read_head(path)[0]
        self.described: Description = _description(path, self._head, read_head(path)[1])
        self.source = read_source(path, self._head)
        self.has_keys = has_keys
        self.num_rows = self._head.num_rows
        self._saved: SavedTable | None = None

    @staticmethod
    def all_in(folder: str) -> dict[str, TableFile]:
        """Of a SavedModel, by the tables' names."""
        found = (TableFile(path) for path in sorted(glob.glob(f"{glob.escape(folder)}/assets/*.sok")))
        return {one.described.name: one for one in found}

    def of(self, has_keys: bool, saved: SavedTable) -> TableFile:
        """The same; without keys, its one row is that of keys without rows. saved: what the job says of the table."""
        self.has_keys, self._saved = has_keys, saved
        return self

    def initial_rows(self, words: np.ndarray) -> np.ndarray:
        """The rows [n, D] of keys that nobody has trained: of an identity table, whatever keys without rows read as.

        Raises:
            ValueError: neither the file nor the job says how they are made.
        """
        described, saved = self.described, self._saved
        if saved is None or described.hashed or isinstance(described.unseen, InitializerSpec):
            return unseen_rows(described, words)
        kind, a, b = (saved.initializer[name] for name in ("kind", "a", "b"))
        if kind not in KINDS or kind == "bank":
            raise ValueError(
                f"Table '{described.name}' has a row for each of its keys, which an initializer of kind {kind!r} has "
                "made; an export with `default` does not hold it. Export it with default='initial'."
            )
        unseen = np.full(described.dim, a, np.float32) if kind == "constant" else InitializerSpec(kind, a, b)
        return unseen_rows(dataclasses.replace(described, unseen=unseen, seed=saved.seed), words)

    @property
    def path(self) -> str:
        """Of the file."""
        return self._path

    def rows_of(self, words: np.ndarray) -> np.ndarray:
        """The rows [n, D] float32 of words [n]: of those that are not there, what they read as."""
        rows = unseen_rows(self.described, words)
        if not self.num_rows or (self.described.hashed and not self.has_keys):
            return rows
        if self.described.hashed:
            mixed, asked = self._mixed(), mixed_keys(words)
            places = np.minimum(np.searchsorted(mixed, asked), len(mixed) - 1)
            is_there = mixed[places] == asked
        else:
            is_there = words < np.uint64(self.num_rows)
            places = np.where(is_there, words, 0).astype(np.int64)
        rows[is_there] = self._wide(self._records()[places[is_there]])
        return rows

    def has_outgrown_its_place(self, num_rows: int) -> bool:
        """Whether so many rows are better written anew: a file is, in any case."""
        return False

    def write(self, path: str, changes: Changes, is_full: bool) -> tuple[int, int]:
        """Writes the next file; gives its rows, 0 if no key has one, and bytes. What it goes on from was verified.

        Args:
            path: of the next file.
            is_full: what is not among the changes has no row.
        """
        values = narrowed(self.described.row_dtype, changes.rows, self.described.name, 0)
        records = records_of(self.described, values["rows"], values.get("scales"))
        if not self.described.hashed:
            return self._write_identity(path, changes, records, is_full)
        mixed = mixed_keys(changes.words)
        order = np.argsort(mixed)
        mixed, records = mixed[order], records[order]
        old = np.zeros(0, np.uint64) if is_full or not self.has_keys else self._mixed()
        gone = np.concatenate([mixed, mixed_keys(changes.erased)])
        kept = np.flatnonzero(~np.isin(old, gone)) if len(old) else np.zeros(0, np.int64)
        all_mixed = np.concatenate([old[kept], mixed])
        if not len(all_mixed):  # one key that reads as those do that are not there
            word = unmixed_keys(np.zeros(1, np.uint64))
            fresh = narrowed(self.described.row_dtype, unseen_rows(self.described, word), "", 0)
            row = records_of(self.described, fresh["rows"], fresh.get("scales"))
            return 0, _written(path, self.described, np.zeros(1, np.uint64), [row])
        places = np.argsort(all_mixed, kind="stable")
        num_kept = len(kept)

        def pieces() -> Iterator[np.ndarray]:
            stored, step = self._records(), max(1, PIECE_BYTES // self.described.row_bytes)
            for begin in range(0, len(places), step):
                some = places[begin : begin + step]
                out = np.empty([len(some), self.described.row_bytes], np.uint8)
                is_old = some < num_kept
                out[is_old] = stored[kept[some[is_old]]]
                out[~is_old] = records[some[~is_old] - num_kept]
                yield out

        return len(places), _written(path, self.described, all_mixed[places], pieces())

    def _write_identity(self, path: str, changes: Changes, records: np.ndarray, is_full: bool) -> tuple[int, int]:
        described, stored = self.described, self._records()
        fresh = np.setdiff1d(changes.erased, changes.words)

        def pieces() -> Iterator[np.ndarray]:
            step = max(1, PIECE_BYTES // described.row_bytes)
            for begin in range(0, self.num_rows, step):
                end = min(begin + step, self.num_rows)
                out = np.array(stored[begin:end])
                again = np.arange(begin, end, dtype=np.uint64) if is_full else _within(fresh, begin, end)
                if len(again):
                    values = narrowed(described.row_dtype, self.initial_rows(again), described.name, 0)
                    made = records_of(described, values["rows"], values.get("scales"))
                    out[(again - np.uint64(begin)).astype(np.int64)] = made
                here = _within(changes.words, begin, end)
                places = np.searchsorted(changes.words, here)
                out[(here - np.uint64(begin)).astype(np.int64)] = records[places]
                yield out

        return self.num_rows, _written(path, described, None, pieces(), self.num_rows)

    def _mixed(self) -> np.ndarray:
        return np.fromfile(self._path, "<u8", self.num_rows, offset=self._head.keys_offset)

    def _records(self) -> np.ndarray:
        shape = (self.num_rows, self._head.row_bytes)
        if not self.num_rows or self.source:
            return np.zeros((0, self._head.row_bytes), np.uint8)
        return np.memmap(self._path, np.uint8, "r", offset=self._head.rows_offset, shape=shape)

    def _wide(self, records: np.ndarray) -> np.ndarray:
        """Rows [n, D] float32 of what is stored of them."""
        dtype, first = self.described.row_dtype, 4 if self.described.row_dtype == tf.int8 else 0
        size = dtype.size * self.described.dim
        rows = np.ascontiguousarray(records[:, first : first + size]).view(dtype.as_numpy_dtype).astype(np.float32)
        return rows * np.ascontiguousarray(records[:, :4]).view("<f4") if first else rows


def _within(words: np.ndarray, begin: int, end: int) -> np.ndarray:
    return words[(words >= np.uint64(begin)) & (words < np.uint64(end))]


def _written(
    path: str,
    described: Description,
    mixed: np.ndarray | None,
    pieces: Iterable[np.ndarray],
    num_rows: int | None = None,
) -> int:
    """Bytes of a file that was written of pieces of records."""
    file = ServingFile(path, described, mixed, len(mixed) if mixed is not None else num_rows or 0)
    with contextlib.closing(file):
        for piece in pieces:
            file.add_records(piece)
        return file.finish()


def key_dtype_of(head: Head) -> tf.DType:
    """Of the keys of a file."""
    return tf.as_dtype(f"{'u' if head.flags & 2 else ''}int{8 * head.key_bytes}")


def _description(name: str, head: Head, table: str) -> Description:
    """What `head` was made of."""
    numbers = np.fromfile(name, "<f4", head.unseen_bytes // 4, offset=head.unseen_offset)
    kind = KINDS[head.unseen_kind]
    unseen = numbers if kind == "constant" else InitializerSpec(kind, head.unseen_a, head.unseen_b, tuple(numbers))
    dtype = next(dtype for dtype, number in ROW_TYPES.items() if number == head.row_type)
    return Description(table, head.dim, dtype, key_dtype_of(head), bool(head.flags & 1), head.seed, unseen)


def unseen_rows(table: Description, words: np.ndarray) -> np.ndarray:
    """What keys without a row read as [n, D] float32: bit for bit what servers make of them."""
    if isinstance(table.unseen, np.ndarray):
        return np.tile(table.unseen, [len(words), 1])
    without_rows = dataclasses.replace(table, row_dtype=tf.float32, key_dtype=tf.uint64, hashed=True, source="")
    ops = _ops.serving_lib()
    with tempfile.TemporaryDirectory(prefix="sok_unseen_") as folder, tf.init_scope(), tf.device("/CPU:0"):
        path = os.path.join(folder, "table.sok")
        with contextlib.closing(ServingFile(path, without_rows, np.zeros(0, np.uint64), 0)) as file:
            file.finish()
        handle = ops.sok_serving_table(shared_name="unseen", anonymous=True)
        ops.sok_serving_open(handle, path)
        return ops.sok_serving_lookup(handle, tf.constant(words), dim=table.dim).numpy()
