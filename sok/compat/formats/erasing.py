"""Keys in dumps of SOK v2 (`sok.dump`): where they lie, and a dump without them. Loads no TensorFlow."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

import numpy as np

from sok.checkpoint.erasing import Record, Wanted
from sok.checkpoint.shard_blocks import among, keys_of
from sok.compat.formats import convert, v2
from sok.compat.formats.columns import StoredTable
from sok.compat.formats.writing import TMP_TAG


def name_in(file: str) -> str | None:
    """What the files of a dump begin with of which a file has the keys or the rows; None if it is none of these."""
    name, _, part = file.partition("-")
    return name if name and part in ("key", "weight") else None


def records(path: str, wanted: Wanted) -> Iterator[Record]:
    """Where keys lie in the dump of one variable, `path` being that of its files without `-key`.

    Raises:
        FileNotFoundError, FormatError, OSError: a file is missing, or not what it should be.
    """
    stored = _open(path)
    dtype = stored.keys.dtype.newbyteorder("=").name
    words = _words(path, wanted, dtype)
    for start, stop in stored.pieces() if len(words) else ():
        for key in keys_of(among(_words_at(stored, start, stop), words), dtype):
            yield Record(path, os.path.basename(path), key, is_row=True)


def erase_from(path: str, wanted: Wanted) -> tuple[list[Record], str]:
    """Writes a dump anew without keys; gives those that it had and, if they are still there, what to do about it.

    Old files stay until the new ones are on the disk; their names change as in `sok.dump`, the keys' last.

    Raises:
        as `records`; OSError: a file cannot be written.
    """
    for left in glob.glob(f"{glob.escape(path)}-*.tmp"):
        if TMP_TAG.search(left):
            os.unlink(left)
    found = list(records(path, wanted))
    stored = _open(path)
    if found and len(found) == stored.num_rows:
        return found, "would have no rows left: remove its files"
    if found and _is_matrix(stored):
        return found, "has each row of a variable, and could not be loaded without one: dump the variable anew"
    if found:
        words = _words(path, wanted, stored.keys.dtype.newbyteorder("=").name)
        convert.convert(f"v2:{path}", f"v2:{path}", show=False, without=words)
        if still := next(records(path, wanted), None):
            raise RuntimeError(f"{still}: it is still there.")
    return found, ""


def _open(path: str) -> StoredTable:
    directory, name = os.path.split(path)
    return v2.open_table(directory, name, *v2.find_slots(directory, name))


def _words(path: str, wanted: Wanted, key_dtype: str) -> np.ndarray:
    """Those of the table whose dump it is: of its name, or of the variable of this name."""
    dumped = os.path.basename(path)
    tables = [t for t in wanted.of_tables if dumped in (v2.file_name(t), v2.file_name(f"{t}:0"))]
    return wanted.words(tables[0] if tables else "", key_dtype)


def _words_at(stored: StoredTable, start: int, stop: int) -> np.ndarray:
    return convert.as_words(stored.keys.read(start, stop))


def _is_matrix(stored: StoredTable) -> bool:
    """Whether the keys are all row numbers from 0 on."""
    parts = [_words_at(stored, start, stop) for start, stop in stored.pieces()]
    return max(int(part.max()) for part in parts) == stored.num_rows - 1
