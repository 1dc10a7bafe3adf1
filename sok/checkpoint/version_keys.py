"""The rows of a version, out of the log that has them, read without TensorFlow: docs/design/versions.md."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

import numpy as np

from sok.base.errors import CheckpointError
from sok.checkpoint.crc32c import crc32c_each

_TRIES = 5
_BLOCK = 4096
_HEAD = 24  # bytes in front of a record: CRC, row, key, order
_APPEND_BITS = 44  # of an order; the version is above


@dataclasses.dataclass(frozen=True)
class Log:
    """Where the rows of a shard lie."""

    path: str
    floats: int  # of a record and what lies behind it
    block_bytes: int
    rows: int  # row numbers
    version: int
    digest: int
    offsets: tuple[int, ...]  # of each slot set the first float


def log_of(name: str, head: bytes) -> Log:
    """What the head of the shard `name`, of rows in a log, says of that.

    Raises:
        CheckpointError: it says nothing that could be.
    """
    num_sets = int.from_bytes(head[12:16], "little")
    numbers = struct.Struct("<4QIQ" + "Qq" * num_sets)
    end = len(head) - numbers.size
    # The path is behind its length, and has no byte 0, as any number in it would that is a length.
    for size in range(1, max(1, min(end - 4, 65536))):
        if int.from_bytes(head[end - size - 4 : end - size], "little") == size:
            floats, block_bytes, _, rows, version, digest, *of_sets = numbers.unpack_from(head, end)
            if not 0 < floats < 2**24 or block_bytes < _slot_bytes(floats) or block_bytes > 2**27 or rows > 2**32:
                break
            path = head[end - size : end].decode(errors="surrogateescape")
            return Log(path, floats, block_bytes, rows, version, digest, tuple(of_sets[::2]))
    raise CheckpointError(f"{name}: at offset 0: its head does not say which log has its rows.")


def keys_in(log: Log, bits: np.ndarray) -> Iterator[np.ndarray]:
    """The keys of `records_in`."""
    for keys, _ in records_in(log, bits):
        yield keys


def records_in(log: Log, bits: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of the rows that `bits` [words] uint64 names the keys, as words [n] uint64, and records [n, floats] float32.

    They come in any order, and in parts.

    Takes 8 bytes a row number, and the log is read twice.

    Raises:
        CheckpointError, OSError: the log is not there, or not what was written.
    """
    if 64 * len(bits) < log.rows:
        raise CheckpointError(f"{log.path}: bits of rows of version {log.version} are missing.")
    has_row = np.unpackbits(bits.astype("<u8").view(np.uint8), bitorder="little")[: log.rows].astype(bool)
    orders = np.zeros(log.rows, np.uint64)
    wanted = np.flatnonzero(has_row)
    for _ in range(_TRIES):  # a job that goes on moves records while they are looked for
        for rows, _, found, _ in _slots(log, has_row, orders):
            np.maximum.at(orders, rows, found)
        if orders[wanted].all() and _digest(wanted, orders[wanted]) == log.digest:
            break
    else:
        raise CheckpointError(f"{log.path}: rows of version {log.version} are not what was written.")
    left = len(wanted)
    for _ in range(_TRIES):
        for rows, keys, found, records in _slots(log, has_row, orders, newest=True):
            first = np.unique(rows[found == orders[rows]], return_index=True)[1]
            chosen = np.flatnonzero(found == orders[rows])[first]
            has_row[rows[chosen]] = False
            left -= len(chosen)
            yield keys[chosen], records[chosen]
        if left == 0:
            return
    raise CheckpointError(f"{log.path}: {left} rows have gone while it was read.")


def _slots(
    log: Log, has_row: np.ndarray, orders: np.ndarray, newest: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Rows, keys, orders and floats of records of the version that are whole, and newer than `orders`, or as new."""
    slot_bytes = _slot_bytes(log.floats)
    per_block = log.block_bytes // slot_bytes
    with open(log.path, "rb") as file:
        while data := file.read(max(1, 2**22 // log.block_bytes) * log.block_bytes):
            blocks = np.frombuffer(data, np.uint8)
            blocks = blocks[: len(blocks) // log.block_bytes * log.block_bytes].reshape(-1, log.block_bytes)
            slots = blocks[:, : per_block * slot_bytes].reshape(-1, slot_bytes)
            rows = slots[:, 4:8].copy().view("<u4")[:, 0].astype(np.int64)
            order = slots[:, 16:24].copy().view("<u8")[:, 0]
            of_version = order >> np.uint64(_APPEND_BITS)
            may = (rows < log.rows) & (of_version > 0) & (of_version <= log.version)
            at = np.flatnonzero(may)
            at = at[has_row[rows[at]]]
            at = at[(order[at] >= orders[rows[at]]) if newest else (order[at] > orders[rows[at]])]
            if not len(at):
                continue
            chosen = np.ascontiguousarray(slots[at, : _HEAD + 4 * log.floats])
            is_whole = crc32c_each(chosen[:, 4:]) == chosen[:, :4].copy().view("<u4")[:, 0]
            at, chosen = at[is_whole], chosen[is_whole]
            if len(at):
                yield (
                    rows[at],
                    slots[at, 8:16].copy().view("<u8")[:, 0],
                    order[at],
                    chosen[:, _HEAD:].copy().view("<f4"),
                )


def _slot_bytes(floats: int) -> int:
    size = -(-(_HEAD + 4 * floats) // 8) * 8
    return size if size <= _BLOCK else -(-size // _BLOCK) * _BLOCK


def _digest(rows: np.ndarray, orders: np.ndarray) -> int:
    """As include/sok/version_order.h says."""
    with np.errstate(over="ignore"):
        x = orders + np.uint64(0x9E3779B97F4A7C15) * (rows.astype(np.uint64) + np.uint64(1))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))
