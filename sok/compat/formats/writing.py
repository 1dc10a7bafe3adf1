"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

# How the names end of files that are not complete.
TMP_TAG = re.compile(r"\.[0-9a-f]{12}\.tmp$")


@dataclass(frozen=True)
class NewColumn:
    """A file to be written: header, then an array [n] or [n, width]."""

    path: str
    header: bytes
    dtype: np.dtype
    width: int | None = None


class TableWriter:
    """Writes the columns of one table, in pieces, into files of other names; `commit` gives them their own.

    Old files of these names stay what they are until `commit`. That first removes the first of them (the keys), then
    renames the others, and the keys last: whenever it is interrupted, no keys stand beside rows of another time.

    Args:
        columns: the files, keys first.
        obsolete: files that would not belong to the new ones, and go when those come.

    Raises:
        OSError: a file cannot be made or written; the message names it. Nothing is left behind.
    """

    def __init__(self, columns: Sequence[NewColumn], obsolete: Sequence[str] = ()) -> None:
        self._columns = list(columns)
        self._obsolete = list(obsolete)
        self._files: list[BinaryIO] = []
        tag = f".{uuid.uuid4().hex[:12]}.tmp"
        self._temporary = [column.path + tag for column in self._columns]
        self.num_rows = 0
        with self._giving_up():
            for column, path in zip(self._columns, self._temporary, strict=True):
                with _writing(path):
                    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                    self._files.append(open(path, "xb"))  # noqa: SIM115 - closed by flush or abort
                    self._files[-1].write(column.header)

    def write(self, *arrays: np.ndarray) -> None:
        """Appends rows to each column, in the order of the columns."""
        with self._giving_up():
            for column, file, path, array in zip(self._columns, self._files, self._temporary, arrays, strict=True):
                if array.shape != (len(arrays[0]),) + (() if column.width is None else (column.width,)):
                    raise ValueError(f"{column.path}: rows of shape {array.shape} do not belong here.")
                with _writing(path):
                    # Not tofile: it says nothing when the disk is full before the buffer is.
                    file.write(np.ascontiguousarray(array, column.dtype).data.cast("B") if array.size else b"")
        self.num_rows += len(arrays[0])

    def flush(self) -> None:
        """Brings all data to the disk. What could go wrong with a disk goes wrong here, with the old files whole."""
        with self._giving_up():
            for file, path in zip(self._files, self._temporary, strict=True):
                with _writing(path):
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()

    def commit(self) -> None:
        """Gives the files their names. Call `flush` first."""
        for path, file in zip(self._temporary, self._files, strict=True):
            assert file.closed, f"{path} was not flushed"
        pairs = list(zip(self._temporary, [column.path for column in self._columns], strict=True))
        folders = {os.path.dirname(path) or "." for _, path in pairs}
        for path in [pairs[0][1], *self._obsolete]:
            with _writing(path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                _sync(os.path.dirname(path) or ".")
        for temporary, path in [*pairs[1:], pairs[0]]:
            with _writing(path):
                os.replace(temporary, path)
        for folder in folders:
            _sync(folder)

    def abort(self) -> None:
        """Removes what was written."""
        for file in self._files:
            # Closing may find the disk full; that is being told already.
            with contextlib.suppress(OSError):
                file.close()
        for path in self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(path)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}.") from error
