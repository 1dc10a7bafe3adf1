"""Tables of a native export as files: docs/design/serving_table.md. Written here, searched by libsok_serving.so."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.base.errors import DamagedFileError
from sok.table.initializers import InitializerSpec

MAGIC, VERSION = b"SOKSERVE", 1
HEAD_BYTES = 4096
REMOTE = 4  # the flag of a file without rows: its source, behind the name, says where they are
CHECKSUM_BYTES = 1 << 20
KEYS_PER_BUCKET = 16
MAX_NAME_BYTES = 1024
ROW_TYPES = {tf.float32: 0, tf.float16: 1, tf.int8: 2}
KINDS = ("constant", "uniform", "normal", "truncated_normal", "bank")

_LAYOUT = struct.Struct("<8s4I7Q2I4QIffIQQ")
_MASK = (1 << 64) - 1
_FACTOR = 0xD6E8FEB86659FD93


class Head(NamedTuple):
    """What stands at the front of a file, in its order; include/sok/serving_table.h says what each is."""

    magic: bytes
    version: int
    flags: int
    key_bytes: int
    row_type: int
    dim: int
    row_bytes: int
    num_rows: int
    file_bytes: int
    unseen_offset: int
    unseen_bytes: int
    directory_offset: int
    directory_bits: int
    unseen_kind: int
    keys_offset: int
    rows_offset: int
    checksums_offset: int
    num_checksums: int
    checksums_crc: int
    unseen_a: float
    unseen_b: float
    name_bytes: int
    seed: int
    bank_rows: int


@dataclasses.dataclass(frozen=True)
class Description:
    """A table, as its file describes it. `unseen` is the row [D] of keys that have none, or how it is made."""

    name: str
    dim: int
    row_dtype: tf.DType
    key_dtype: tf.DType
    hashed: bool
    seed: int
    unseen: np.ndarray | InitializerSpec
    source: str = ""  # where the rows are, if not in the file

    @property
    def row_bytes(self) -> int:
        """From one row to the next."""
        needed = {tf.float32: 4 * self.dim, tf.float16: 2 * self.dim, tf.int8: 4 + self.dim}[self.row_dtype]
        return _aligned(needed, 4)


def mixed_keys(words: np.ndarray) -> np.ndarray:
    """The 64-bit words of keys [n] uint64 as the file sorts them: evenly spread, and one to one."""
    mixed = words.copy()
    for _ in range(2):
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_FACTOR)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def unmixed_keys(mixed: np.ndarray) -> np.ndarray:
    """What `mixed_keys` was given."""
    words = mixed.copy()
    words ^= words >> np.uint64(32)
    for _ in range(2):
        words *= np.uint64(pow(_FACTOR, -1, 1 << 64))
        words ^= words >> np.uint64(32)
    return words


def head_of(table: Description, num_rows: int) -> Head:
    """Where everything lies in the file of a table of so many rows; its checksum is still to come."""
    spec = table.unseen if isinstance(table.unseen, InitializerSpec) else InitializerSpec("constant")
    kind = KINDS.index(spec.kind)
    num_bank = len(spec.bank) // table.dim if spec.kind == "bank" else 0
    unseen_bytes = 4 * table.dim * (1 if kind == 0 else num_bank)
    hashed, stored = (False, 0) if table.source else (table.hashed, num_rows)  # as far as the file goes
    directory = _aligned(HEAD_BYTES + unseen_bytes, 64)
    bits = (max(1, -(-num_rows // KEYS_PER_BUCKET)) - 1).bit_length() if hashed else 0
    keys = _aligned(directory + (8 * ((1 << bits) + 1) if hashed else 0), 64)
    rows = _aligned(keys + (8 * num_rows if hashed else 0), 4096)
    checksums = rows + table.row_bytes * stored
    num_checksums = -(-(checksums - HEAD_BYTES) // CHECKSUM_BYTES)
    return Head(
        magic=MAGIC,
        version=VERSION,
        flags=int(table.hashed) + 2 * int(table.key_dtype.is_unsigned) + REMOTE * bool(table.source),
        key_bytes=table.key_dtype.size,
        row_type=ROW_TYPES[table.row_dtype],
        dim=table.dim,
        row_bytes=table.row_bytes,
        num_rows=num_rows,
        file_bytes=checksums + 4 * num_checksums,
        unseen_offset=HEAD_BYTES,
        unseen_bytes=unseen_bytes,
        directory_offset=directory,
        directory_bits=bits,
        unseen_kind=kind,
        keys_offset=keys,
        rows_offset=rows,
        checksums_offset=checksums,
        num_checksums=num_checksums,
        checksums_crc=0,
        unseen_a=spec.a,
        unseen_b=spec.b,
        name_bytes=len(_name(table)),
        seed=table.seed & _MASK,
        bank_rows=num_bank,
    )


class ServingFile:
    """Writes the file of one table from front to back.

    Args:
        path: of the file; what is there is replaced.
        table: what it is.
        mixed: `mixed_keys` of all keys, rising [n]; None for an identity table.
        num_rows: n.

    Raises:
        OSError: naming the file.
    """

    def __init__(self, path: str, table: Description, mixed: np.ndarray | None, num_rows: int) -> None:
        self._path, self._table, self._head = path, table, head_of(table, num_rows)
        self._crc, self._at = 0, HEAD_BYTES
        self._checksums: list[int] = []
        # Unbuffered: what is written is large, and nothing is left to be written when a full disk ends it.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (`close` closes it)
        try:
            self._file.seek(HEAD_BYTES)
            self._write_front(table, mixed)
        except BaseException:
            self._file.close()
            raise

    def add(self, rows: np.ndarray, scales: np.ndarray | None = None) -> None:
        """Writes the next rows [m, D], as float32, float16, or int8 with `scales` [m]."""
        self.add_records(records_of(self._table, rows, scales))

    def add_records(self, records: np.ndarray) -> None:
        """Writes the next rows as `records_of` gives them [m, row_bytes]."""
        self._append(records)

    def finish(self) -> int:
        """Writes the rest, head last, and waits for the disk; gives the size of the file."""
        if self._at != self._head.checksums_offset:
            raise ValueError(f"{self._path}: {self._head.num_rows} rows were promised, and others came.")
        if self._at % CHECKSUM_BYTES != HEAD_BYTES % CHECKSUM_BYTES:
            self._checksums.append(self._crc)
        checksums = np.array(self._checksums, "<u4")
        head = self._head._replace(checksums_crc=_ops.crc32c(checksums))
        page = np.zeros(HEAD_BYTES, np.uint8)
        front = _LAYOUT.pack(*head) + _name(self._table)
        if self._table.source:
            source = self._table.source.encode()
            front += struct.pack("<I", len(source)) + source
        if len(front) > HEAD_BYTES - 4:
            raise ValueError(
                f"{self._path}: the table's name and where its rows are need {len(front)} bytes: too many."
            )
        page[: len(front)] = np.frombuffer(front, np.uint8)
        page[-4:] = np.array([_ops.crc32c(page[:-4])], "<u4").view(np.uint8)
        self._write(checksums)
        self._file.seek(0)
        self._write(page)
        os.fsync(self._file.fileno())
        self._file.close()
        return head.file_bytes

    def close(self) -> None:
        """Leaves what is written as it is. May be called twice."""
        self._file.close()

    def _write_front(self, table: Description, mixed: np.ndarray | None) -> None:
        """All before the rows."""
        if isinstance(table.unseen, np.ndarray):
            self._append(table.unseen.astype("<f4"))
        elif table.unseen.kind == "bank":
            self._append(np.array(table.unseen.bank, "<f4"))
        if mixed is not None:
            self._fill_to(self._head.directory_offset)
            self._append(_directory(mixed, self._head.directory_bits))
            self._fill_to(self._head.keys_offset)
            self._append(mixed)
        self._fill_to(self._head.rows_offset)

    def _fill_to(self, offset: int) -> None:
        self._append(np.zeros(offset - self._at, np.uint8))

    def _append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        while len(data):
            piece = data[: CHECKSUM_BYTES - (self._at - HEAD_BYTES) % CHECKSUM_BYTES]
            self._crc = _ops.crc32c(piece, self._crc)
            self._write(piece)
            self._at += len(piece)
            if (self._at - HEAD_BYTES) % CHECKSUM_BYTES == 0:
                self._checksums.append(self._crc)
                self._crc = 0
            data = data[len(piece) :]

    def _write(self, data: np.ndarray) -> None:
        left = np.ascontiguousarray(data).view(np.uint8).data
        try:
            while len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OSError(
                error.errno, f"cannot write a table of a native export: {error.strerror}", self._path
            ) from None


def records_of(table: Description, rows: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
    """Rows [m, D], with `scales` [m] of int8 ones, as the bytes that are stored of them [m, row_bytes]."""
    records = np.zeros([len(rows), table.row_bytes], np.uint8)
    begin = 0
    if scales is not None:
        records[:, :4] = scales.astype("<f4")[:, None].view(np.uint8)
        begin = 4
    of_rows = np.ascontiguousarray(rows).view(np.uint8)
    records[:, begin : begin + of_rows.shape[1]] = of_rows
    return records


def read_source(path: str, head: Head) -> str:
    """Where the rows are, of a file that has none of its own; else "". The head was checked."""
    if not head.flags & REMOTE:
        return ""
    with open(path, "rb") as file:
        file.seek(_LAYOUT.size + head.name_bytes)
        (length,) = struct.unpack("<I", file.read(4))
        return file.read(min(length, HEAD_BYTES)).decode(errors="backslashreplace")


def read_head(path: str) -> tuple[Head, str]:
    """The head of a file, and the table's name.

    Raises:
        OSError: the file cannot be read.
        DamagedFileError: it is none of ours, or cut off.
    """
    with open(path, "rb") as file:
        page = file.read(HEAD_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(page) < HEAD_BYTES:
        raise DamagedFileError(f"{path}: at offset {len(page)}: the file ends inside its head of {HEAD_BYTES} bytes.")
    head = Head(*_LAYOUT.unpack_from(page))
    if head.magic != MAGIC:
        raise DamagedFileError(f"{path}: at offset 0: not a table of a native export.")
    if head.version != VERSION:
        raise DamagedFileError(f"{path}: at offset 8: version {head.version} of the layout; this sok knows {VERSION}.")
    if _ops.crc32c(np.frombuffer(page[:-4], np.uint8)) != struct.unpack("<I", page[-4:])[0]:
        raise DamagedFileError(f"{path}: at offset 0: the head does not have the CRC that it says.")
    if size != head.file_bytes:
        raise DamagedFileError(
            f"{path}: at offset {min(size, head.file_bytes)}: the file has {size:,} bytes, where its head says "
            f"{head.file_bytes:,}."
        )
    name = page[_LAYOUT.size : _LAYOUT.size + min(head.name_bytes, MAX_NAME_BYTES)]
    return head, name.decode(errors="backslashreplace")


def verify_file(path: str) -> Head:
    """Reads all of a file, and checks it. Needs memory for one of its pieces of 1 MiB.

    Raises:
        OSError, DamagedFileError: as `read_head`; a piece does not have its CRC.
    """
    head, _ = read_head(path)
    end = head.checksums_offset
    if end < HEAD_BYTES or end + 4 * head.num_checksums != head.file_bytes:
        raise DamagedFileError(f"{path}: at offset 104: the checksums do not fit into the file.")
    if head.num_checksums != -(-(end - HEAD_BYTES) // CHECKSUM_BYTES):
        raise DamagedFileError(f"{path}: at offset 112: there are not as many checksums as pieces.")
    with open(path, "rb") as file:
        file.seek(end)
        checksums = np.frombuffer(file.read(4 * head.num_checksums), "<u4")
        if _ops.crc32c(checksums) != head.checksums_crc:
            raise DamagedFileError(f"{path}: at offset {end}: the checksums are damaged.")
        for (offset, piece), checksum in zip(_pieces(file, end), checksums, strict=True):
            if _ops.crc32c(piece) != checksum:
                last = offset + len(piece)
                raise DamagedFileError(f"{path}: at offset {offset}: bytes up to {last:,} do not have their CRC.")
    return head


def _pieces(file: BinaryIO, end: int) -> Iterator[tuple[int, np.ndarray]]:
    file.seek(HEAD_BYTES)
    for offset in range(HEAD_BYTES, end, CHECKSUM_BYTES):
        yield offset, np.frombuffer(file.read(min(CHECKSUM_BYTES, end - offset)), np.uint8)


def _directory(mixed: np.ndarray, bits: int) -> np.ndarray:
    """Where the keys of each of 2^bits buckets begin, and where the last ends."""
    starts = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits) if bits else np.zeros(1, np.uint64)
    return np.append(np.searchsorted(mixed, starts), len(mixed)).astype("<u8")


def _name(table: Description) -> bytes:
    return table.name.encode(errors="backslashreplace")[:MAX_NAME_BYTES]


def _aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to
