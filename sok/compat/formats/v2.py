"""Files of SOK v2's `dump`: arrays after a header of 296 bytes.

    DIRECTORY/NAME-key                 keys [n]
    DIRECTORY/NAME-weight              rows [n, D]
    DIRECTORY/NAME-OPTIMIZER-SLOT      a slot of each row [n, D]

NAME is that of the TensorFlow variable ("user:0") with punctuation replaced by "_" ("user_0"). The header: 256 bytes of
table name, the kind of file (u32, big-endian: 0 keys, 1 rows, 2 slots), 32 bytes of slot name, and the dtype (u32,
big-endian). Texts stand to the right, after spaces; SOK leaves the table name blank, and so do we. Data are
little-endian. n and D stand nowhere: n follows from the size of the keys, D from that of the rows.

Source: `dump_load.py` of SOK 2.1 (d4fecdb3f of NVIDIA-Merlin/HugeCTR).
"""

from __future__ import annotations

import os
import string
import struct
from collections.abc import Sequence

import numpy as np

from sok.compat.formats.columns import FileColumn, FormatError, StoredTable, array_in, reading, size_of
from sok.compat.formats.writing import NewColumn

_HEADER = struct.Struct(">256sI32sI")
HEADER_BYTES = _HEADER.size

_KEYS, _ROWS, _SLOT = 0, 1, 2
_KINDS = {_KEYS: "keys", _ROWS: "weights", _SLOT: "optimizer state"}
_DTYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")

_NO_PUNCTUATION = str.maketrans(string.punctuation, "_" * len(string.punctuation))


def file_name(variable_name: str) -> str:
    """What the files of a variable begin with.

    Example:
        >>> file_name("tower/user:0")
        'tower_user_0'
    """
    return variable_name.translate(_NO_PUNCTUATION)


def key_path(directory: str, name: str) -> str:
    return os.path.join(directory, f"{name}-key")


def weight_path(directory: str, name: str) -> str:
    return os.path.join(directory, f"{name}-weight")


def slot_path(directory: str, name: str, optimizer: str, slot: str) -> str:
    return os.path.join(directory, f"{name}-{optimizer}-{slot}")


def header(kind: int, dtype: np.dtype, slot: str = "") -> bytes:
    """The first 296 bytes of a file."""
    return _HEADER.pack(b" " * 256, kind, slot.rjust(32).encode(), _DTYPES.index(dtype.name))


def open_table(directory: str, name: str, optimizer: str = "", slots: Sequence[str] = ()) -> StoredTable:
    """The table in `directory` whose files begin with `name`, and slots of an optimizer.

    Raises:
        FileNotFoundError: a file is missing.
        FormatError: a header that makes no sense, no keys, or sizes that do not go together.
    """
    dtype = _read_header(key_path(directory, name), _KEYS)
    keys = array_in(key_path(directory, name), HEADER_BYTES, dtype, None, "keys")
    if keys.shape[0] == 0:
        raise FormatError(f"{keys.path}: holds no keys after its header of {HEADER_BYTES} bytes.")
    rows = _open_rows(weight_path(directory, name), _ROWS, "", keys)
    found = {slot: _open_rows(slot_path(directory, name, optimizer, slot), _SLOT, slot, keys) for slot in slots}
    return StoredTable(keys, rows, found)


def slots_beside(directory: str, name: str) -> dict[str, list[str]]:
    """By optimizer, the slots whose files lie beside those of a table. None if there is no such directory."""
    found: dict[str, list[str]] = {}
    for entry in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        # Slot names have no dash, and neither has a table's.
        parts = entry.split("-")
        if len(parts) == 3 and parts[0] == name and not entry.endswith(".tmp"):
            found.setdefault(parts[1], []).append(parts[2])
    return found


def obsolete_slots(directory: str, name: str, optimizer: str, slots: Sequence[str]) -> list[str]:
    """Files of slots that a dump of the same table has left, and that one with these slots does not replace."""
    return [
        slot_path(directory, name, other, slot)
        for other, left in slots_beside(directory, name).items()
        for slot in left
        if (other != optimizer or slot not in slots) and _is_slot_file(slot_path(directory, name, other, slot), slot)
    ]


def _is_slot_file(path: str, slot: str) -> bool:
    """Whether a file is what its name says. Others are somebody's own, and not ours to remove."""
    try:
        _read_header(path, _SLOT, slot)
    except (FormatError, OSError):
        return False
    return True


def find_slots(directory: str, name: str) -> tuple[str, list[str]]:
    """The one optimizer with slots beside a table, and these; '' and none if there are none.

    Raises:
        FormatError: there are slots of several optimizers.
    """
    found = slots_beside(directory, name)
    if len(found) > 1:
        raise FormatError(f"{directory}: holds slots of several optimizers for {name}: {', '.join(found)}. Keep one.")
    return next(iter(found.items()), ("", []))


def _open_rows(path: str, kind: int, slot: str, keys: FileColumn) -> FileColumn:
    dtype = _read_header(path, kind, slot)
    data = size_of(path) - HEADER_BYTES
    row_bytes, rest = divmod(data, keys.shape[0])
    if rest or row_bytes == 0 or row_bytes % dtype.itemsize:
        raise FormatError(
            f"{path}: {data} bytes after the header are no whole number of {dtype.name} for each of the "
            f"{keys.shape[0]} keys in {keys.path}. One of the files was cut off, or they belong to different dumps."
        )
    return array_in(path, HEADER_BYTES, dtype, row_bytes // dtype.itemsize, "rows")


def _read_header(path: str, kind: int, slot: str = "") -> np.dtype:
    size = size_of(path)
    if size < HEADER_BYTES:
        raise FormatError(f"{path}: has {size} bytes, and the header alone takes {HEADER_BYTES}. It was cut off.")
    with reading(path), open(path, "rb") as file:
        _, found_kind, found_slot, code = _HEADER.unpack(file.read(HEADER_BYTES))
    if found_kind != kind:
        was = _KINDS.get(found_kind, "no kind of file that SOK writes")
        raise FormatError(f"{path}: byte 256 must say {kind} ({_KINDS[kind]}). It says {found_kind} ({was}).")
    text = found_slot.decode("utf-8", "replace").strip()
    if text != slot:
        raise FormatError(f"{path}: byte 260 must name slot '{slot}'. It names '{text}'.")
    accepted = _DTYPES[:4] if kind == _KEYS else _DTYPES[4:]
    if code >= len(_DTYPES) or _DTYPES[code] not in accepted:
        known = ", ".join(f"{_DTYPES.index(name)} ({name})" for name in accepted)
        raise FormatError(f"{path}: byte 292 must give the dtype, one of {known}. It says {code}.")
    return np.dtype(_DTYPES[code]).newbyteorder("<")


def new_columns(
    directory: str,
    name: str,
    key_dtype: np.dtype,
    dim: int,
    num_rows: int,
    optimizer: str = "",
    slots: Sequence[str] = (),
) -> list[NewColumn]:
    """The files to write for a table."""
    f4 = np.dtype("<f4")
    return [
        NewColumn(key_path(directory, name), header(_KEYS, key_dtype), key_dtype.newbyteorder("<")),
        NewColumn(weight_path(directory, name), header(_ROWS, f4), f4, dim),
        *(NewColumn(slot_path(directory, name, optimizer, s), header(_SLOT, f4, s), f4, dim) for s in slots),
    ]
