"""From the files of one system to those of another, piece by piece: no table is in memory, and TensorFlow not loaded.

A table's files are called by an address, FORMAT:PLACE. Each format says how it reads and writes one; another format is
one more line in `FORMATS`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sok.compat.formats import npy, v1, v2
from sok.compat.formats.columns import KEY_DTYPES, StoredTable
from sok.compat.formats.fitting import Destination, keys_for
from sok.compat.formats.showing import Shown
from sok.compat.formats.writing import NewColumn, TableWriter
from sok.table.placement import row_wise


@dataclass(frozen=True)
class Options:
    """What an address does not say.

    Args:
        dim: D, which the files of SOK v1 do not tell.
        key_dtype: of the keys to be written; None: as they are.
    """

    dim: int | None = None
    key_dtype: np.dtype | None = None


@dataclass(frozen=True)
class NewTable:
    """What is known of a table when its first row has not been written."""

    key_dtype: np.dtype
    dim: int
    num_rows: int
    optimizer: str = ""
    slots: Sequence[str] = ()


@dataclass(frozen=True)
class Format:
    """How a format reads and writes the table at a place.

    Args:
        open: place and options to the table, and the name of the optimizer whose slots it has, or ''.
        create: place and table to what takes rows: `write(keys, rows, *slots)`, `flush()`, `commit()`, `abort()`.
        holds_slots: whether files of this format hold slots.
        key_dtypes: what keys may be.
    """

    open: Callable[[str, Options], tuple[StoredTable, str]]
    create: Callable[[str, NewTable], Any]
    holds_slots: bool
    key_dtypes: Sequence[str]


def convert(source: str, target: str, options: Options, show: bool | None = None) -> str:
    """Writes what is at one address to another. Old files there are replaced when the new ones are whole.

    Args:
        source, target: addresses, 'FORMAT:PLACE'.
        options: what these do not say.
        show: progress; see `Shown`.

    Returns:
        A sentence that says what was done.

    Raises:
        ValueError: an address or option makes no sense; a `FormatError` names the file and place that is not in order.
        FileNotFoundError, OSError: a file is missing, or cannot be read or written.
    """
    reader, read_place = _format_of(source)
    writer, write_place = _format_of(target)
    stored, optimizer = reader.open(read_place, options)
    key_dtype = options.key_dtype or stored.keys.dtype.newbyteorder("=")
    if key_dtype.name not in writer.key_dtypes:
        raise ValueError(
            f"{target}: keys must be {' or '.join(writer.key_dtypes)} there. In {source} they are {key_dtype.name}: "
            f"give --key-dtype {writer.key_dtypes[0]}."
        )
    slots = tuple(stored.slots) if writer.holds_slots else ()
    to = Destination("converted", stored.dim, key_dtype, stored.num_rows, None, 0, 1, row_wise())
    # All keys first: one that does not fit is found before anything is written.
    pieces = list(stored.pieces())
    for start, stop in pieces:
        keys_for(stored, to, start, stop)
    new = writer.create(
        write_place, NewTable(key_dtype, stored.dim, stored.num_rows, optimizer if slots else "", slots)
    )
    try:
        shown = Shown(f"convert {read_place}", stored.num_rows, show)
        for start, stop in pieces:
            columns = [stored.rows, *(stored.slots[slot] for slot in slots)]
            rows = [column.read(start, stop).astype(np.float32, copy=False) for column in columns]
            new.write(keys_for(stored, to, start, stop), *rows)
            shown.add(stop - start)
        shown.close()
        new.flush()
    except BaseException:
        new.abort()
        raise
    new.commit()
    return _summary(stored, slots, target)


def _summary(stored: StoredTable, slots: Sequence[str], target: str) -> str:
    lost = [slot for slot in stored.slots if slot not in slots]
    text = f"{stored.num_rows:,} rows of {stored.dim} written to {target}"
    if slots:
        text += f", with slots {', '.join(slots)}"
    if lost:
        text += f". Slots {', '.join(lost)} were left out: that format holds none"
    return text + "."


def _format_of(address: str) -> tuple[Format, str]:
    name, colon, place = address.partition(":")
    if not colon or name not in FORMATS or not place:
        raise ValueError(f"'{address}' must be FORMAT:PLACE, with FORMAT one of {', '.join(FORMATS)}.")
    return FORMATS[name], place


def _directory_and_name(place: str) -> tuple[str, str]:
    directory, name = os.path.split(place)
    if not name:
        raise ValueError(f"'{place}' must be DIRECTORY/NAME.")
    return directory or ".", name


def _open_v1(place: str, options: Options) -> tuple[StoredTable, str]:
    if options.dim is None:
        raise ValueError(f"v1:{place}: give --dim, the length of a row. These files do not tell it.")
    return v1.open_table(*_directory_and_name(place), options.dim, options.key_dtype), ""


def _create_v1(place: str, table: NewTable) -> TableWriter:
    return TableWriter(v1.new_columns(*_directory_and_name(place), table.key_dtype, table.dim, table.num_rows))


def _open_v2(place: str, options: Options) -> tuple[StoredTable, str]:
    directory, name = _directory_and_name(place)
    optimizer, slots = v2.find_slots(directory, name)
    return v2.open_table(directory, name, optimizer, slots), optimizer


def _create_v2(place: str, table: NewTable) -> TableWriter:
    directory, name = _directory_and_name(place)
    if name != v2.file_name(name):
        raise ValueError(
            f"v2:{place}: SOK replaces punctuation in names of files: give {v2.file_name(name)}. For a variable NAME "
            "that is NAME_0."
        )
    if table.num_rows == 0:
        raise ValueError(f"v2:{place}: there are no rows, and SOK cannot load a dump of none.")
    return TableWriter(
        v2.new_columns(directory, name, table.key_dtype, table.dim, table.num_rows, table.optimizer, table.slots),
        v2.obsolete_slots(directory, name, table.optimizer, table.slots),
    )


def _npy_paths(place: str) -> tuple[str, str]:
    keys, _, values = place.partition(",")
    if not keys or not values or "," in values:
        raise ValueError(f"npy:{place}: must be npy:KEYS.npy,VALUES.npy.")
    return keys, values


def _open_npy(place: str, options: Options) -> tuple[StoredTable, str]:
    return npy.open_table(*_npy_paths(place)), ""


def _create_npy(place: str, table: NewTable) -> TableWriter:
    columns: list[NewColumn] = npy.new_columns(*_npy_paths(place), table.key_dtype, table.dim, table.num_rows)
    return TableWriter(columns)


FORMATS = {
    "v1": Format(_open_v1, _create_v1, holds_slots=False, key_dtypes=("int64", "uint32")),
    "v2": Format(_open_v2, _create_v2, holds_slots=True, key_dtypes=KEY_DTYPES),
    "npy": Format(_open_npy, _create_npy, holds_slots=False, key_dtypes=KEY_DTYPES),
}


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
        say(convert(options.source, options.target, Options(options.dim, key_dtype), False if options.quiet else None))
    except (ValueError, OSError) as error:
        complain(str(error))
        return 1
    return 0
