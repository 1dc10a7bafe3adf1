"""Keys in exported models: where they lie, and the tables of a native export without them."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import fingerprinting_utils

from sok.checkpoint.erasing import Record, Wanted
from sok.checkpoint.manifest import sync_folder
from sok.checkpoint.shard_blocks import among, keys_of
from sok.saved_model.checkpoint import PiecewiseCheckpoint, sweep
from sok.saved_model.feed_changes import Changes
from sok.saved_model.rows import PIECE_BYTES
from sok.saved_model.serving_file import Head, mixed_keys, read_head, unmixed_keys, verify_file
from sok.saved_model.table_file import TableFile, key_dtype_of

_PARTIAL = ".partial"
_KEYS_AT_A_TIME = 1 << 20


def records(path: str, wanted: Wanted) -> Iterator[Record]:
    """Where keys lie in the SavedModel at `path`, if `sok.export_saved_model` has written it.

    An identity table has a row for each legal key, trained or not.

    Raises:
        OSError, DamagedFileError: a table of a native export is missing or damaged.
        tf.errors.OpError: the variables of another one are.
    """
    told = description(path)
    if told is None or not can_be_searched(path):
        return
    if not told["native"]:
        yield from _records_of_variables(path, told["tables"], wanted)
        return
    for name in _files(path):
        head, table = read_head(name)
        for key in _found(name, head, _words(wanted, table, head)) if table not in _empty(told) else ():
            yield Record(path, table, key, is_row=True)


def _empty(told: dict[str, Any]) -> set[str]:
    """Tables without keys, which have one that reads as those do that are not there."""
    return {table["name"] for table in told["tables"] if not table["num_rows"]}


def description(path: str) -> dict[str, Any] | None:
    """What `sok.export_saved_model` has told of its tables; None: it has not written this."""
    try:
        return json.loads(Path(path, "assets.extra", "sok.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def can_be_searched(path: str) -> bool:
    """Whether `records` sees all tables of an export."""
    told = description(path)
    if told is not None and "rows" in told:
        return False
    return told is not None and (told["native"] or not told["tables"] or _is_readable(path))


def erase_from(path: str, wanted: Wanted) -> tuple[list[Record], str]:
    """Takes keys out of the tables of an export; gives those that it had and, if they are still there, what to do.

    Of a native export each table's file, and of another one the file of all variables, is written anew and takes the
    old one's place at once; the model can be loaded at any moment, and after an interruption the next call completes
    the work. In an identity table of a native export a key has its initial row, or what keys without a row read as,
    again. Servers that have loaded the model hold the rows until they load it anew.

    Raises:
        as `records`; OSError: a file cannot be written.
    """
    told = description(path)
    if told is not None and "rows" in told:
        return [], (
            f"has its rows in {told['rows']}: export it anew from the erased tables; this version goes from there when "
            "its grace is over (`grace_seconds`)"
        )
    if told is None or not can_be_searched(path):
        return [], "does not say which variables are tables': if some are, export it anew from the erased tables"
    if not told["native"]:
        return _erase_from_variables(path, told, wanted)
    found: list[Record] = []
    sizes: dict[str, tuple[int, int]] = {}
    empty = _empty(told)
    for left in glob.glob(f"{glob.escape(path)}/assets/*.sok{_PARTIAL}"):
        os.unlink(left)
    for name in _files(path):
        head = verify_file(name)
        table = read_head(name)[1]
        words = _words(wanted, table, head) if table not in empty else np.zeros(0, np.uint64)
        sizes[table] = (head.num_rows, head.file_bytes)
        if keys := _found(name, head, words):
            found += [Record(path, table, key, is_row=True) for key in keys]
            changes = Changes(words[:0], np.zeros([0, head.dim], np.float32), words)
            sizes[table] = TableFile(name).write(name + _PARTIAL, changes, is_full=False)
            os.rename(name + _PARTIAL, name)
            verify_file(name)
    sync_folder(os.path.join(path, "assets"))
    _tell(path, told, sizes)
    return found, ""


def _files(path: str) -> list[str]:
    return sorted(glob.glob(f"{glob.escape(path)}/assets/*.sok"))


def _words(wanted: Wanted, table: str, head: Head) -> np.ndarray:
    return wanted.words(table, key_dtype_of(head).name)


def _found(name: str, head: Head, words: np.ndarray) -> list[int]:
    """The keys of `words` [n] that a file has rows of."""
    if not head.flags & 1:
        there = words[words < np.uint64(head.num_rows)]
    else:
        mixed = np.sort(mixed_keys(words))
        there = [among(part, mixed) for part in _mixed_in(name, head)] if len(words) else []
        there = np.sort(unmixed_keys(np.concatenate([np.zeros(0, np.uint64), *there])))
    return keys_of(there, key_dtype_of(head).name)


def _mixed_in(name: str, head: Head) -> Iterator[np.ndarray]:
    for begin in range(0, head.num_rows, _KEYS_AT_A_TIME):
        n = min(_KEYS_AT_A_TIME, head.num_rows - begin)
        yield np.fromfile(name, "<u8", n, offset=head.keys_offset + 8 * begin)


def _tell(path: str, told: dict[str, Any], sizes: Mapping[str, tuple[int, int]]) -> None:
    """Brings up to date what the export has told of its tables: rows and bytes of each."""
    tables = [dict(table) for table in told["tables"]]
    for table in tables:
        rows, num_bytes = sizes.get(table["name"], (table["num_rows"], table["num_bytes"]))
        if table["num_bytes"] != num_bytes:
            table.update(num_rows=rows, num_bytes=num_bytes)
    if tables != told["tables"]:
        name = os.path.join(path, "assets.extra", "sok.json")
        with open(name + ".tmp", "w", encoding="utf-8") as file:
            file.write(json.dumps({**told, "tables": tables}, indent=2))
        os.rename(name + ".tmp", name)


def _records_of_variables(path: str, tables: list[dict[str, Any]], wanted: Wanted) -> Iterator[Record]:
    reader = _reader(path)
    for number, table in enumerate(tables):
        keys = wanted.of_tables.get(table["name"], wanted.everywhere)
        if _is_hashed(reader, number):
            known = reader.get_tensor(_variable(number, "keys"))
            words = set(known[: table["num_rows"]].tolist())
            there = [key for key, word in _as_bits(keys, known.dtype) if word in words]
        else:
            there = [key for key in keys if 0 <= key < table["num_rows"]]
        yield from (Record(path, table["name"], key, is_row=True) for key in there)


def _as_bits(keys: Iterable[int], dtype: np.dtype) -> Iterator[tuple[int, int]]:
    """Keys with their bits as variables have them; whether these stand for signed keys an export does not say."""
    half = 2 ** (8 * dtype.itemsize - 1)
    return ((key, (key + half) % (2 * half) - half) for key in keys if -half <= key < 2 * half)


def _erase_from_variables(path: str, told: dict[str, Any], wanted: Wanted) -> tuple[list[Record], str]:
    prefix, folder = os.path.join(path, "variables", "variables"), os.path.join(path, "variables", "erasing")
    sweep(prefix, folder)
    tables = told["tables"]
    found = list(_records_of_variables(path, tables, wanted))
    reader, new = _reader(path), None
    for number, table in enumerate(tables):
        gone = [one.key for one in found if one.table == table["name"]]
        if gone and (not _is_hashed(reader, number) or len(gone) == table["num_rows"]):
            again = "export it anew from the erased tables: sok.export_saved_model(model, path, overwrite=True)"
            return found, f"has a row for each key of table '{table['name']}', or only these: {again}"
    for number, table in enumerate(tables):
        gone = [one.key for one in found if one.table == table["name"]]
        if not gone:
            continue
        new = new or PiecewiseCheckpoint(prefix, folder)
        keys = reader.get_tensor(_variable(number, "keys"))
        kept = ~np.isin(keys, [word for _, word in _as_bits(gone, keys.dtype)])
        num_rows = int(kept.sum())
        for name in ("keys", "rows", "scales"):
            if not reader.has_tensor(_variable(number, name)):
                continue
            values = reader.get_tensor(_variable(number, name))[kept]
            step = max(1, PIECE_BYTES // max(1, values[:1].nbytes))
            for begin in range(0, num_rows, step):
                new.add(_variable(number, name), num_rows, begin, values[begin : begin + step])
    if new is not None:
        new.exchange()
    sizes = {t["name"]: _size(_reader(path), number) for number, t in enumerate(tables) if t["num_rows"]}
    _tell(path, told, sizes)
    fingerprint = os.path.join(path, "fingerprint.pb")
    if os.path.exists(fingerprint) and os.path.getmtime(f"{prefix}.index") > os.path.getmtime(fingerprint):
        fingerprinting_utils.write_fingerprint(path)
    return found, ""


def _size(reader: Any, number: int) -> tuple[int, int]:
    """Rows and bytes of a table."""
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    names = [name for name in (_variable(number, part) for part in ("keys", "rows", "scales")) if name in shapes]
    return shapes[names[-1]][0], sum(int(np.prod(shapes[name])) * dtypes[name].size for name in names)


def _variable(number: int, name: str) -> str:
    return f"tables/{number}/{name}/.ATTRIBUTES/VARIABLE_VALUE"


def _is_hashed(reader: Any, number: int) -> bool:
    return reader.has_tensor(_variable(number, "keys"))


def _reader(path: str) -> Any:
    return tf.train.load_checkpoint(os.path.join(path, "variables", "variables"))


def _is_readable(path: str) -> bool:
    """Whether the variables of tables have names that say so: not those of a v1 session's export."""
    return _reader(path).has_tensor(_variable(0, "rows"))
