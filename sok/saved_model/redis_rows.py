"""A native export whose rows lie in Redis: the tables' files say where, and what the tables are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from sok.base import _ops, log
from sok.saved_model.native_table import NativeFiles, NativeTable
from sok.saved_model.redis_place import RedisPlace, bits_of
from sok.saved_model.redis_store import OVERHEAD_BYTES, VersionStore
from sok.saved_model.serving_file import Description, ServingFile, mixed_keys, records_of

_KEY_BYTES, _CRC_BYTES = 8, 4


class RedisFiles(NativeFiles):
    """Files that say where rows are, and the rows in Redis.

    Raises:
        RuntimeError: libsok_serving.so was built without hiredis, so that nobody could read them.
    """

    def __init__(self, place: RedisPlace) -> None:
        super().__init__()
        if not _ops.has_redis():
            raise RuntimeError(
                "`rows`: this libsok_serving.so was built without hiredis and could not read rows from Redis. Install "
                f"it (Debian, Ubuntu: apt-get install libhiredis-dev). {_ops.remedy()}."
            )
        self.place = place
        self._store: VersionStore | None = None
        self._is_placed = False

    @property
    def rows(self) -> str:
        """Of all tables, as `sok inspect` says it."""
        return f"{self.place} version {self._store.version if self._store else ''}"

    @property
    def settings(self) -> dict[str, int]:
        return {"grace_seconds": self.place.grace_seconds, "lease_seconds": self.place.lease_seconds}

    def begin(self) -> None:
        self._store = VersionStore(self.place)
        self._store.begin()

    def writer(self, frozen: NativeTable, num_rows: int, words: np.ndarray | None) -> Any:
        store, bits = self._begun(), bits_of(num_rows)
        table = frozen.description()
        record_bytes = table.row_bytes + _KEY_BYTES + _CRC_BYTES
        number = store.add_table(bits, num_rows * (record_bytes + OVERHEAD_BYTES))
        described = frozen.description(self.place.source(store.version, number, bits))
        file = ServingFile(os.path.join(self._folder, frozen.file_name), described, None, num_rows)
        keys = None if words is None else frozen.wide(words)
        return RowsWriter(store, number, bits, file, table, keys)

    def finish(self) -> None:
        self._begun().publish()

    def placed(self) -> None:
        self._is_placed = True
        try:
            self._begun().retire_others()
        except OSError as error:  # what was exported is served already
            log.logger.warning("older versions stay until the next export: %s", error)

    def close(self) -> None:
        super().close()
        if self._store is not None:
            with contextlib.closing(self._store):
                if not self._is_placed:
                    self._store.abandon()

    def _begun(self) -> VersionStore:
        if self._store is None:
            raise RuntimeError("`begin` comes first")
        return self._store


class RowsWriter:
    """Takes the rows of a table.

    Args:
        file: that says where they are; None: another one does.
        keys: of the rows that come, as 64-bit words [n]; None: 0, 1, ...
        identity: "VERSION:TABLE" that rows are checked by; "": of this version.
    """

    def __init__(
        self,
        store: VersionStore,
        number: int,
        bits: int,
        file: ServingFile | None,
        table: Description,
        keys: np.ndarray | None,
        identity: str = "",
    ) -> None:
        self._store, self._number, self._bits, self._file = store, number, bits, file
        self._table, self._keys = table, keys
        identity = identity or f"{store.version}:{number}"
        self._crc_before = _ops.crc32c(np.frombuffer(identity.encode(), np.uint8))
        self.num_bytes = 0

    def add(self, begin: int, values: dict[str, np.ndarray]) -> None:
        rows = records_of(self._table, values["rows"], values.get("scales"))
        n = len(rows)
        keys = np.arange(begin, begin + n, dtype=np.uint64) if self._keys is None else self._keys[begin : begin + n]
        self.add_records(keys, rows)

    def add_records(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows of keys [n], 64-bit words, as they are stored [n, row_bytes]."""
        n = len(rows)
        named = np.concatenate([keys.astype("<u8")[:, None].view(np.uint8).reshape(n, _KEY_BYTES), rows], axis=1)
        crcs = _ops.crc32c_each(named, self._crc_before)
        records = np.concatenate([rows, crcs.astype("<u4")[:, None].view(np.uint8)], axis=1)
        self._store.write(self._number, self._parts(keys, records))
        self.num_bytes += n * (_KEY_BYTES + records.shape[1])

    def _parts(self, keys: np.ndarray, records: np.ndarray) -> Iterator[tuple[int, list[bytes]]]:
        """The fields and values of each bucket."""
        buckets = (mixed_keys(keys) >> np.uint64(64 - self._bits)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        buckets, names, size = buckets[order], keys[order].astype("<u8").tobytes(), records.shape[1]
        values = np.ascontiguousarray(records[order]).tobytes()
        edges = np.flatnonzero(np.diff(buckets, prepend=-1, append=-1))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            fields: list[bytes] = []
            for i in range(first, last):
                fields.append(names[_KEY_BYTES * i : _KEY_BYTES * (i + 1)])
                fields.append(values[size * i : size * (i + 1)])
            yield int(buckets[first]), fields

    def finish(self) -> None:
        if self._file is not None:
            self._file.finish()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
