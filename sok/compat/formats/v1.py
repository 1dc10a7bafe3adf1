"""Files of SOK v1's `Saver`: two arrays without a header.

    DIRECTORY/NAME_keys.file      int64 or uint32 [n], little-endian
    DIRECTORY/NAME_values.file    float32 [n, D]

Source: what SOK 1.1.4 writes and reads (tag v4.3 of NVIDIA-Merlin/HugeCTR). Nothing in the files says what is in them;
the dtype of keys follows from the sizes, once D is known.
"""

from __future__ import annotations

import os

import numpy as np

from sok.compat.formats.columns import FormatError, StoredTable, array_in, size_of
from sok.compat.formats.writing import NewColumn


def paths(directory: str, name: str) -> tuple[str, str]:
    """Where keys and values of a table lie.

    Raises:
        ValueError: the name leads out of the directory.
    """
    if os.path.isabs(name) or ".." in name.split("/"):
        raise ValueError(f"The files of a table cannot be named after '{name}': they would not lie in {directory}.")
    return os.path.join(directory, f"{name}_keys.file"), os.path.join(directory, f"{name}_values.file")


def open_table(directory: str, name: str, dim: int, key_dtype: np.dtype | None = None) -> StoredTable:
    """The table `name` in `directory`.

    Args:
        dim: D, the length of its rows.
        key_dtype: what keys of 8 or 4 bytes are meant to be, if they have its size. None: int64 and uint32, as SOK has
            them.

    Raises:
        FileNotFoundError: a file is missing.
        FormatError: a file is empty, or their sizes do not go together.
    """
    keys_path, values_path = paths(directory, name)
    sizes = [size_of(path) for path in (keys_path, values_path)]
    for path, size in zip((keys_path, values_path), sizes, strict=True):
        if size == 0:
            raise FormatError(f"{path}: is empty. A table that had no rows when it was dumped cannot be restored.")
    rows = array_in(values_path, 0, np.dtype("<f4"), dim, "rows")
    known: dict[int, np.dtype] = {8: np.dtype("<i8"), 4: np.dtype("<u4")}
    if key_dtype is not None:
        known[key_dtype.itemsize] = key_dtype.newbyteorder("<")
    dtype = next((dtype for size, dtype in known.items() if size * rows.shape[0] == sizes[0]), None)
    if dtype is None:
        raise FormatError(
            f"{keys_path}: {sizes[0]} bytes are neither 8 nor 4 for each of the {rows.shape[0]} rows of {dim} numbers "
            f"in {values_path} ({sizes[1]} bytes). One of the files was cut off, or rows have another length."
        )
    return StoredTable(array_in(keys_path, 0, dtype, None, "keys"), rows)


def new_columns(directory: str, name: str, key_dtype: np.dtype, dim: int, num_rows: int) -> list[NewColumn]:
    """The files to write for a table."""
    keys_path, values_path = paths(directory, name)
    return [
        NewColumn(keys_path, b"", key_dtype.newbyteorder("<")),
        NewColumn(values_path, b"", np.dtype("<f4"), dim),
    ]
