"""A table that lies in files: columns of keys, rows and slots, read in pieces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sok.base.errors import FormatError

# What a worker sends at a time when a table is written; SOK's own number, which decides on the order of rows in files.
PIECE_BYTES = 64 * 2**20

# What is read at a time: a few copies of it are in memory until its rows are in the table.
READ_BYTES = 16 * 2**20

KEY_DTYPES = ("int64", "int32", "uint32", "uint64")
ROW_DTYPES = ("float32", "float16", "float64")


class Column(Protocol):
    """One array [n] or [n, width], of which rows can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop)."""

    def place(self, row: int) -> str:
        """Where a row lies, for messages."""


@dataclass(frozen=True)
class FileColumn:
    """An array in a file, row by row, from `offset` on. It is read, never mapped: a file that somebody cuts gives an
    error and not a signal, and what was read does not count as this process' memory."""

    path: str
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def read(self, start: int, stop: int) -> np.ndarray:
        count = (stop - start) * (self.row_bytes // self.dtype.itemsize)
        offset = self.offset + start * self.row_bytes
        with reading(self.path):
            array = np.fromfile(self.path, self.dtype, count, offset=offset)
        if array.size != count:
            raise FormatError(
                f"{self.path}: ends at byte {offset + array.nbytes}, and was longer when it was opened. Does somebody "
                "write it?"
            )
        return array.reshape(stop - start, *self.shape[1:])

    def place(self, row: int) -> str:
        return f"{self.path}, byte {self.offset + row * self.row_bytes}"


@dataclass(frozen=True)
class ArrayColumn:
    """An array in memory, or mapped by its owner."""

    name: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self.array[start:stop])

    def place(self, row: int) -> str:
        return f"{self.name}[{row}]"


@dataclass(frozen=True)
class RangeColumn:
    """The numbers 0, 1, ..., n - 1: keys of a matrix."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.int64)

    def place(self, row: int) -> str:
        return f"row {row}"


class ChainedColumn:
    """Arrays in files, one after another.

    Args:
        parts: in order; of equal dtypes and widths.
        dtype, width: of them; None: [n].
    """

    def __init__(self, parts: Sequence[FileColumn], dtype: np.dtype, width: int | None = None) -> None:
        self._parts, self._dtype = parts, dtype
        self._starts = np.cumsum([0, *(part.shape[0] for part in parts)])
        self._shape = (int(self._starts[-1]), *([] if width is None else [width]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        pieces = [np.zeros((0, *self._shape[1:]), self._dtype)]
        for number in range(self.part_of(start), len(self._parts)):
            first = int(self._starts[number])
            if first >= stop:
                break
            part = self._parts[number]
            pieces.append(part.read(max(start - first, 0), min(stop - first, part.shape[0])))
        return np.concatenate(pieces)

    def place(self, row: int) -> str:
        number = self.part_of(row)
        return self._parts[number].place(row - int(self._starts[number])) if self._parts else "no rows"

    def part_of(self, row: int) -> int:
        """Which part a row is in; of one behind the last, the last."""
        return min(max(int(np.searchsorted(self._starts, row, "right")) - 1, 0), max(len(self._parts) - 1, 0))


@dataclass(frozen=True)
class StoredTable:
    """Keys, their rows, and slots of one optimizer: the i-th row of each column belongs to the i-th key.

    Slots are as wide as rows, but for `scalars`, which are one number a row.

    Raises:
        FormatError: a dtype that no table has, or columns of different lengths or widths.
    """

    keys: Column  # [n]
    rows: Column  # [n, D]
    slots: Mapping[str, Column] = field(default_factory=dict)  # each [n, D], of scalars [n, 1]
    scalars: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.keys.dtype.name not in KEY_DTYPES or len(self.keys.shape) != 1:
            raise FormatError(
                f"{self.keys.place(0)}: keys must be [n] of {', '.join(KEY_DTYPES)}. "
                f"Found: {list(self.keys.shape)} of {self.keys.dtype.name}."
            )
        for name, column in (("", self.rows), *self.slots.items()):
            if column.dtype.name not in ROW_DTYPES or len(column.shape) != 2 or column.shape[1] == 0:
                raise FormatError(
                    f"{column.place(0)}: rows must be [n, D] of {', '.join(ROW_DTYPES)}. "
                    f"Found: {list(column.shape)} of {column.dtype.name}."
                )
            if column.shape != (self.num_rows, 1 if name in self.scalars else self.dim):
                raise FormatError(
                    f"{column.place(0)}: holds {column.shape[0]} rows of {column.shape[1]}, but there are "
                    f"{self.num_rows} keys ({self.keys.place(0)}) and rows of {self.dim} ({self.rows.place(0)})."
                )

    @property
    def num_rows(self) -> int:
        return self.keys.shape[0]

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """[start, stop) of pieces that cover all rows, about `READ_BYTES` each."""
        yield from pieces(self.num_rows, self.dim * (1 + len(self.slots)))


def pieces(num_rows: int, floats: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of pieces that cover `num_rows` rows of a key and `floats` floats, about `READ_BYTES` each."""
    step = max(1, READ_BYTES // (8 + 4 * floats))
    for start in range(0, num_rows, step):
        yield start, min(num_rows, start + step)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Around what reads a file: errors of the system say which, and what to do."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file.") from None
    except OSError as error:
        raise OSError(f"{path}: cannot be read: {error.strerror or error}.") from error


def size_of(path: str) -> int:
    """Bytes of a file.

    Raises:
        FileNotFoundError: there is none.
        FormatError: it is no file.
    """
    with reading(path):
        size = os.stat(path).st_size
    if not os.path.isfile(path):
        raise FormatError(f"{path}: is not a file.")
    return size


def array_in(path: str, offset: int, dtype: np.dtype, width: int | None, what: str) -> FileColumn:
    """The array [n] or [n, width] that fills a file from `offset` to its end.

    Raises:
        FileNotFoundError, FormatError: there is no such file; it does not end with a whole row.
    """
    size = size_of(path)
    row_bytes = dtype.itemsize * (1 if width is None else width)
    data = size - offset
    if data < 0 or data % row_bytes:
        raise FormatError(
            f"{path}: {size} bytes are {offset} of header and {data} of data, which is no whole number of {what} of "
            f"{row_bytes} bytes. It was cut off, or is a file of another kind"
            + ("." if width is None else f", or its rows are not {width} numbers long.")
        )
    n = data // row_bytes
    return FileColumn(path, offset, dtype, (n,) if width is None else (n, width))
