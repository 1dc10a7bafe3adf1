"""Rows in Redis that follow a job: the next version begins as a copy of the one before, made inside Redis."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sok.base import _ops, log
from sok.checkpoint.manifest import SavedTable
from sok.saved_model.feed_changes import Changes
from sok.saved_model.redis_place import RedisPlace, bits_of
from sok.saved_model.redis_rows import RowsWriter
from sok.saved_model.redis_store import OVERHEAD_BYTES, VersionStore
from sok.saved_model.rows import PIECE_BYTES, narrowed
from sok.saved_model.serving_file import ServingFile, mixed_keys, records_of, unmixed_keys
from sok.saved_model.table_file import TableFile

_KEY_BYTES, _CRC_BYTES = 8, 4


def followed_redis(folder: str, told: Mapping[str, Any]) -> FollowedRedis | None:
    """The rows of an export, if they lie in Redis."""
    return FollowedRedis(folder, told.get("settings", {})) if "rows" in told else None


class FollowedRedis:
    """Tables whose rows lie in Redis, and a version of them that is being written.

    Raises:
        OSError: of all methods, naming the place.
        RuntimeError: this libsok_serving.so cannot read rows from Redis.
    """

    is_remote = True

    def __init__(self, folder: str, settings: Mapping[str, int]) -> None:
        if not _ops.has_redis():
            raise RuntimeError(f"{folder}: this libsok_serving.so was built without hiredis. {_ops.remedy()}.")
        self._tables = TableFile.all_in(folder)
        self._settings = settings
        self._store: VersionStore | None = None
        self._is_placed = False
        self._place: RedisPlace | None = None
        self.is_full = False

    def begin(self, is_full: bool) -> None:
        """Begins a version. `is_full` is then whether the rows of the one before are of no use, or gone."""
        self.is_full = is_full
        for table in self._tables.values():
            self._place, words = RedisPlace.of_source(table.source, self._settings)
            if self._store is None:
                self._store = VersionStore(self._place)
                self._store.begin()
            self.is_full = self.is_full or not self._store.is_readable(
                words["version"], int(words["table"]), int(words["bucket_bits"])
            )

    def table(self, name: str, has_keys: bool, saved: SavedTable) -> FollowedRedisTable:
        """The table of that name; `has_keys`: or else its one row is that of keys without rows."""
        if name not in self._tables:
            raise ValueError(f"the export has no file of table '{name}'.")
        assert self._store is not None and self._place is not None
        return FollowedRedisTable(self._tables[name].of(has_keys, saved), self._store, self._place)

    def finish(self) -> None:
        """Publishes the version."""
        if self._store is not None:
            self._store.publish()

    def placed(self) -> None:
        """When servers see the version: older ones go when their grace is over."""
        self._is_placed = True
        if self._store is not None:
            try:
                self._store.retire_others()
            except OSError as error:  # what was published is served already
                log.logger.warning("older versions stay until the next one: %s", error)

    def told(self) -> dict[str, Any]:
        """What the export tells of where its rows are."""
        return {"rows": f"{self._place} version {self._store.version}"} if self._store is not None else {}

    def close(self) -> None:
        """Removes the version, if no server can see it."""
        if self._store is not None:
            with contextlib.closing(self._store):
                if not self._is_placed:
                    self._store.abandon()


class FollowedRedisTable:
    """One of them."""

    def __init__(self, file: TableFile, store: VersionStore, place: RedisPlace) -> None:
        self._file, self._store, self._place = file, store, place
        self._words = RedisPlace.of_source(file.source, {})[1]
        self.described, self.num_rows, self.path = file.described, file.num_rows, file.path

    def rows_of(self, words: np.ndarray) -> np.ndarray:
        """Is not asked: where only some columns of rows change, all rows are read."""
        raise RuntimeError("rows in Redis are not read to follow a job")

    def has_outgrown_its_place(self, num_rows: int) -> bool:
        """Whether so many rows need more buckets: Redis answers nobody else while it copies one."""
        return self.described.hashed and bits_of(num_rows) > int(self._words["bucket_bits"]) + 1

    def write(self, path: str, changes: Changes, is_full: bool) -> tuple[int, int]:
        """Writes the rows, and the file that says where they are; gives how many keys have one, and bytes."""
        described, file, words = self.described, self._file, self._words
        if described.hashed:
            is_full = is_full or not file.has_keys
        row_bytes = described.row_bytes + _KEY_BYTES + _CRC_BYTES
        expected = file.num_rows
        if described.hashed:
            expected = len(changes.words) + (0 if is_full else file.num_rows)
        bits = bits_of(expected) if is_full else int(words["bucket_bits"])
        number = self._store.add_table(bits, expected * (row_bytes + OVERHEAD_BYTES))
        identity = ""
        if not is_full:
            identity = words.get("identity", f"{words['version']}:{words['table']}")
            self._store.copy(number, words["version"], int(words["table"]))
        writer = RowsWriter(self._store, number, bits, None, described, None, identity)
        if not described.hashed:
            fresh = np.setdiff1d(changes.erased, changes.words)
            self._write_unseen(writer, np.arange(file.num_rows, dtype=np.uint64) if is_full else fresh)
        elif not is_full:
            self._store.remove_rows(number, _fields_of(changes.erased, bits))
        step = max(1, PIECE_BYTES // described.row_bytes)
        for begin in range(0, len(changes.words), step):
            values = narrowed(described.row_dtype, changes.rows[begin : begin + step], described.name, begin)
            records = records_of(described, values["rows"], values.get("scales"))
            writer.add_records(changes.words[begin : begin + step], records)
        num_rows = self._store.count_rows(number)
        if num_rows == 0:  # one key that reads as those do that are not there
            self._write_unseen(writer, unmixed_keys(np.zeros(1, np.uint64)))
            self._store.count_rows(number)
        source = self._place.source(self._store.version, number, bits, identity)
        out = ServingFile(path, dataclasses.replace(described, source=source), None, max(1, num_rows))
        with contextlib.closing(out):
            out.finish()
        return num_rows, num_rows * row_bytes

    def _write_unseen(self, writer: RowsWriter, words: np.ndarray) -> None:
        """Gives keys the rows that keys without one read."""
        described = self.described
        step = max(1, PIECE_BYTES // described.row_bytes)
        for begin in range(0, len(words), step):
            some = words[begin : begin + step]
            values = narrowed(described.row_dtype, self._file.initial_rows(some), described.name, begin)
            writer.add_records(some, records_of(described, values["rows"], values.get("scales")))


def _fields_of(words: np.ndarray, bits: int) -> dict[int, list[bytes]]:
    """The fields of keys, by bucket."""
    buckets = (mixed_keys(words) >> np.uint64(64 - bits)).astype(np.int64)
    fields: dict[int, list[bytes]] = {}
    for bucket, word in zip(buckets.tolist(), words.tolist(), strict=True):
        fields.setdefault(bucket, []).append(int(word).to_bytes(_KEY_BYTES, "little"))
    return fields
