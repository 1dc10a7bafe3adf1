"""From the files of one system to those of another, piece by piece: no table is in memory, and TensorFlow not loaded.

A table's files are called by an address, FORMAT:PLACE.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import numpy as np

from sok.base.progress import on_stderr
from sok.compat.formats import npy, openembedding, v1, v2
from sok.compat.formats.columns import KEY_DTYPES, StoredTable
from sok.compat.formats.destination import Destination, keys_for
from sok.compat.formats.writing import TableWriter
from sok.table import rules
from sok.table.placement import row_wise

# What keys may be in the files of each format that can be written.
_KEYS_OF: dict[str, Sequence[str]] = {"v1": ("int64", "uint32"), "v2": KEY_DTYPES, "npy": KEY_DTYPES}
_READ_ONLY = ("openembedding",)


def convert(
    source: str,
    target: str,
    dim: int | None = None,
    key_dtype: np.dtype | None = None,
    show: bool | None = None,
    without: np.ndarray | None = None,
) -> str:
    """Writes what is at one address to another. Old files there are replaced when the new ones are whole.

    Args:
        source, target: addresses, 'FORMAT:PLACE'.
        dim: D, which the files of SOK v1 do not tell.
        key_dtype: of the keys to be written; None: as they are.
        show: progress; None: if standard error is a terminal.
        without: 64-bit words [n] of keys that are left out with their rows, if the target is of `v2`.

    Returns:
        A sentence that says what was done.

    Raises:
        ValueError: an address or option makes no sense; a `FormatError` names the file and place that is not in order.
        FileNotFoundError, OSError: a file is missing, or cannot be read or written.
    """
    (reads, read_place), (writes, write_place) = _parts_of(source), _parts_of(target)
    if writes in _READ_ONLY:
        raise ValueError(f"{target}: files of {writes} are read, and not written.")
    stored, optimizer = _open(reads, read_place, dim, key_dtype)
    key_dtype = key_dtype or stored.keys.dtype.newbyteorder("=")
    if key_dtype.name not in _KEYS_OF[writes]:
        raise ValueError(
            f"{target}: keys must be {' or '.join(_KEYS_OF[writes])} there. In {source} they are {key_dtype.name}: "
            f"give --key-dtype {_KEYS_OF[writes][0]}."
        )
    slots = tuple(stored.slots) if writes == "v2" and optimizer else ()
    to = Destination("converted", stored.dim, key_dtype, stored.num_rows, None, 0, 1, row_wise())
    # All keys first: one that does not fit is found before anything is written.
    pieces = list(stored.pieces())
    for start, stop in pieces:
        keys_for(stored, to, start, stop)
    new = _writer(writes, write_place, key_dtype, stored, optimizer if slots else "", slots)
    try:
        with on_stderr(f"convert {read_place}", stored.num_rows, show) as shown:
            for start, stop in pieces:
                columns = [stored.rows, *(stored.slots[slot] for slot in slots)]
                rows = [column.read(start, stop).astype(np.float32, copy=False) for column in columns]
                keys = keys_for(stored, to, start, stop)
                if without is not None:
                    kept = ~np.isin(as_words(keys), without)
                    keys, rows = keys[kept], [of_column[kept] for of_column in rows]
                new.write(keys, *rows)
                shown.add(stop - start)
        new.flush()
    except BaseException:
        new.abort()
        raise
    new.commit()
    return _summary(stored, slots, target)


def as_words(keys: np.ndarray) -> np.ndarray:
    """Keys [n] as 64-bit words [n] uint64: signed ones sign-extended."""
    return keys.astype(np.int64 if keys.dtype.kind == "i" else np.uint64).view(np.uint64)


def _summary(stored: StoredTable, slots: Sequence[str], target: str) -> str:
    lost = [slot for slot in stored.slots if slot not in slots]
    text = f"{stored.num_rows:,} rows of {stored.dim} written to {target}"
    if slots:
        text += f", with slots {', '.join(slots)}"
    if lost:
        text += f". Slots {', '.join(lost)} were left out: that format holds none of these"
    return text + "."


def _parts_of(address: str) -> tuple[str, str]:
    name, colon, place = address.partition(":")
    formats = (*_KEYS_OF, *_READ_ONLY)
    if not colon or name not in formats or not place:
        raise ValueError(f"'{address}' must be FORMAT:PLACE, with FORMAT one of {', '.join(formats)}.")
    return name, place


def _open(kind: str, place: str, dim: int | None, key_dtype: np.dtype | None) -> tuple[StoredTable, str]:
    """The table at a place, and the name of the optimizer whose slots it has, or ''."""
    if kind == "npy":
        return npy.open_table(*_npy_paths(place)), ""
    directory, name = _directory_and_name(place)
    if kind == "openembedding":
        stored, rule = openembedding.open_storage(directory, name)
        return stored, rules.find(rule).dumped_as if rule else ""
    if kind == "v2":
        optimizer, slots = v2.find_slots(directory, name)
        return v2.open_table(directory, name, optimizer, slots), optimizer
    if dim is None:
        raise ValueError(f"v1:{place}: give --dim, the length of a row. These files do not tell it.")
    return v1.open_table(directory, name, dim, key_dtype), ""


def _writer(
    kind: str, place: str, key_dtype: np.dtype, table: StoredTable, optimizer: str, slots: Sequence[str]
) -> TableWriter:
    """What takes the rows of `table` at a place."""
    shape = (key_dtype, table.dim, table.num_rows)
    if kind == "npy":
        keys, values = _npy_paths(place)
        return TableWriter(npy.new_columns(keys, values, *shape))
    directory, name = _directory_and_name(place)
    if kind == "v1":
        return TableWriter(v1.new_columns(directory, name, *shape))
    if name != v2.file_name(name):
        raise ValueError(
            f"v2:{place}: SOK replaces punctuation in names of files: give {v2.file_name(name)}. For a variable NAME "
            "that is NAME_0."
        )
    if table.num_rows == 0:
        raise ValueError(f"v2:{place}: there are no rows, and SOK cannot load a dump of none.")
    return TableWriter(
        v2.new_columns(directory, name, *shape, optimizer, slots), v2.obsolete_slots(directory, name, optimizer, slots)
    )


def _directory_and_name(place: str) -> tuple[str, str]:
    directory, name = os.path.split(place)
    if not name:
        raise ValueError(f"'{place}' must be DIRECTORY/NAME.")
    return directory or ".", name


def _npy_paths(place: str) -> tuple[str, str]:
    keys, _, values = place.partition(",")
    if not keys or not values or "," in values:
        raise ValueError(f"npy:{place}: must be npy:KEYS.npy,VALUES.npy.")
    return keys, values


def main(options: argparse.Namespace, say: Callable[[str], None], complain: Callable[[str], None]) -> int:
    """Runs `sok convert`. Gives its exit status: 1 if it could not be done."""
    if options.dim is not None and options.dim < 1:
        complain(f"--dim must be at least 1. Received: {options.dim}.")
        return 1
    if options.key_dtype not in (None, *KEY_DTYPES):
        complain(f"--key-dtype must be one of {', '.join(KEY_DTYPES)}. Received: {options.key_dtype}.")
        return 1
    key_dtype = None if options.key_dtype is None else np.dtype(options.key_dtype)
    try:
        show = False if options.quiet else None
        say(convert(options.source, options.target, options.dim, key_dtype, show))
    except (ValueError, OSError) as error:
        complain(str(error))
        return 1
    return 0
