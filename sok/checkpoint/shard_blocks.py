"""The blocks of shard files, and keys in them, read without TensorFlow: docs/design/checkpoint.md."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator

import numpy as np

from sok.base.errors import CheckpointError
from sok.checkpoint import version_keys

HEAD, ROWS, ERASED, END, ROW_BITS = 1, 2, 3, 4, 5
_BLOCK = struct.Struct("<IIQII")  # magic, type, length of the payload, CRC, 0
_MAGIC = 0x4B4C4253


def blocks_in(name: str) -> Iterator[tuple[int, int, int]]:
    """Kind, offset and length of each payload of a file, up to the end block's.

    Raises:
        CheckpointError, OSError: it is missing or cut off. (CRCs are not looked at: `sok verify` does.)
    """
    size = os.path.getsize(name)
    with open(name, "rb") as file:
        offset, kind = 0, 0
        while kind != END:
            file.seek(offset)
            head = file.read(_BLOCK.size)
            if len(head) < _BLOCK.size:
                raise CheckpointError(f"{name}: at offset {offset}: the file ends before its end block.")
            magic, kind, length, _, _ = _BLOCK.unpack(head)
            if magic != _MAGIC or length > size - offset - _BLOCK.size:
                raise CheckpointError(f"{name}: at offset {offset}: not a block of a shard, or longer than the file.")
            yield kind, offset + _BLOCK.size, length
            offset += _BLOCK.size + length


def words_in(name: str) -> Iterator[tuple[bool, np.ndarray]]:
    """The keys of each block as 64-bit words [n] uint64, and whether they have rows there; else they were erased.

    Reads 8 bytes a row, whatever a row has; of rows in a log all of that, twice.

    Raises:
        as `blocks_in`, and `version_keys.keys_in`.
    """
    with open(name, "rb") as file:
        for kind, offset, length in blocks_in(name):
            if kind not in (ROWS, ERASED):
                continue
            file.seek(offset)
            n = int.from_bytes(file.read(min(8, length)), "little")
            if 8 + 8 * n > length:
                raise CheckpointError(f"{name}: at offset {offset}: more keys than the block has room for.")
            yield kind == ROWS, np.frombuffer(file.read(8 * n), "<u8")
    if (in_log := rows_in_log(name)) is not None:
        for words in version_keys.keys_in(*in_log):
            yield True, words


def rows_in_log(name: str) -> tuple[version_keys.Log, np.ndarray] | None:
    """The log that has the rows of a shard, and which are its [words] uint64; None of a shard that has them itself.

    Raises:
        as `blocks_in`, and `version_keys.log_of`.
    """
    head, bits = b"", b""
    with open(name, "rb") as file:
        for kind, offset, length in blocks_in(name):
            file.seek(offset)
            if kind == HEAD:
                head = file.read(length)
            elif kind == ROW_BITS:
                bits += file.read(length)
    return (version_keys.log_of(name, head), np.frombuffer(bits, "<u8")) if bits else None


def words_of(keys: Iterable[int], key_dtype: str) -> np.ndarray:
    """Keys as a file of that key dtype has them, [n] uint64, rising; those that do not fit cannot be there.

    >>> words_of([-1, 7, 2**63], "int64").tolist(), words_of([-1, 7], "uint32").tolist()
    ([7, 18446744073709551615], [7])
    """
    limits = np.iinfo(key_dtype)
    fitting = [key % 2**64 for key in keys if limits.min <= key <= limits.max]
    return np.unique(np.array(fitting, np.uint64))


def keys_of(words: np.ndarray, key_dtype: str) -> list[int]:
    """What `words_of` made these words of."""
    return words.astype(np.uint64).view(np.int64 if np.iinfo(key_dtype).min else np.uint64).tolist()


def found_in(name: str, wanted: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """As `words_in`, but only those words that are in `wanted` [m] uint64, which rise."""
    for has_rows, words in words_in(name):
        if len(found := among(words, wanted)):
            yield has_rows, found


def among(words: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Those of `words` [n] that are in `wanted` [m], which rise."""
    if not len(wanted):
        return words[:0]
    places = np.minimum(np.searchsorted(wanted, words), len(wanted) - 1)
    return words[wanted[places] == words]
