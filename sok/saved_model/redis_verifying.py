"""Whether the rows of an export are whole in Redis: each bucket, and each row, as a server would read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sok.base import _ops
from sok.saved_model.redis_place import RedisPlace
from sok.saved_model.redis_store import connected, header, plain_errors
from sok.saved_model.serving_file import mixed_keys
from sok.saved_model.table_file import TableFile

_KEY_BYTES, _CRC_BYTES = 8, 4
_AT_A_TIME = 512  # fields of one command
_MOST_TOLD = 10  # of each table


def verify_rows(file: TableFile) -> list[str]:
    """Reads all rows of a table whose file says that they lie in Redis.

    Returns:
        A line for what is missing or damaged; none if the table is whole.

    Raises:
        ImportError: redis-py is not installed.
        OSError: Redis does not answer.
    """
    place, words = RedisPlace.of_source(file.source, {})
    version, table, bits = words["version"], int(words["table"]), int(words["bucket_bits"])
    identity = words.get("identity", f"{version}:{table}")
    crc_before = _ops.crc32c(np.frombuffer(identity.encode(), np.uint8))
    client = connected(place)
    wrong: list[str] = []
    total = 0
    with plain_errors(place):
        for bucket, name in enumerate(place.bucket_names(version, table, bits)):
            said = client.hget(name, "h")
            rows, wrong_here = _rows_of(client, name, crc_before, file.described.row_bytes, bucket, bits)
            total += rows
            if said is None:
                wrong.append(f"{name}: has no header: the version is gone, or Redis has lost the bucket.")
            elif said.decode(errors="backslashreplace") != header(version, table, bucket, rows):
                wrong.append(f"{name}: has {rows:,} rows, and its header says {said.decode(errors='replace')!r}.")
            wrong += wrong_here
    if not wrong and total != file.num_rows:
        wrong.append(
            f"table '{file.described.name}' has {total:,} rows in {place}, and {file.num_rows:,} were written."
        )
    told = wrong[:_MOST_TOLD]
    return told if len(wrong) <= _MOST_TOLD else [*told, f"table '{file.described.name}': {len(wrong):,} such lines."]


def _rows_of(client: Any, name: str, crc_before: int, row_bytes: int, bucket: int, bits: int) -> tuple[int, list[str]]:
    """How many rows a bucket has, and what is wrong with them."""
    seen: dict[bytes, bytes] = {}
    cursor = 0
    while True:
        cursor, fields = client.hscan(name, cursor, count=_AT_A_TIME)
        seen.update(fields)
        if cursor == 0:
            break
    seen.pop(b"h", None)
    wrong, whole = _of_wrong_size(name, seen, row_bytes)
    if not whole:
        return len(seen), wrong
    keys = np.frombuffer(b"".join(whole), np.uint8).reshape(len(whole), _KEY_BYTES)
    records = np.frombuffer(b"".join(seen[key] for key in whole), np.uint8).reshape(len(whole), row_bytes + _CRC_BYTES)
    crcs = _ops.crc32c_each(np.concatenate([keys, records[:, :row_bytes]], axis=1), crc_before)
    stored = np.ascontiguousarray(records[:, row_bytes:]).view("<u4")[:, 0]
    words = np.ascontiguousarray(keys).view("<u8")[:, 0].astype(np.uint64)
    is_elsewhere = (mixed_keys(words) >> np.uint64(64 - bits)).astype(np.int64) != bucket
    for word in words[crcs != stored].view(np.int64):
        wrong.append(f"{name}: the row of key {word} is not what was written.")
    for word in words[is_elsewhere].view(np.int64):
        wrong.append(f"{name}: key {word} belongs into another bucket.")
    return len(seen), wrong


def _of_wrong_size(name: str, fields: Mapping[bytes, bytes], row_bytes: int) -> tuple[list[str], list[bytes]]:
    wrong, whole = [], []
    for key, value in fields.items():
        if len(key) == _KEY_BYTES and len(value) == row_bytes + _CRC_BYTES:
            whole.append(key)
        else:
            wrong.append(f"{name}: the field {key!r} of {len(value)} bytes is no row of the table.")
    return wrong, whole
