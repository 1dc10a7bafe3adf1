"""Two `.npy` files: keys [n] and rows [n, D]."""

from __future__ import annotations

import io

import numpy as np

from sok.compat.formats.columns import FileColumn, FormatError, StoredTable, array_in, reading
from sok.compat.formats.writing import NewColumn


def open_array(path: str) -> FileColumn:
    """An array in a `.npy` file. Its header is read as NumPy reads it; nothing is unpickled.

    Raises:
        FileNotFoundError, FormatError: there is no such file; it is no `.npy` file, has columns before rows, holds
            objects, or is not as long as its header says.
    """
    with reading(path), open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, is_fortran, dtype = read(file)
        except OSError:
            raise
        except Exception as error:
            # NumPy evaluates a header as a literal of Python's, and passes on what that, the tokenizer and sorting
            # raise: TypeError, IndexError, RecursionError and others, which no list of ours has been long enough for.
            raise FormatError(f"{path}: is no .npy file that can be read here: {error}.") from None
        offset = file.tell()
    # Text of no letters, say, has rows of no bytes.
    if dtype.kind not in "biufc" or not 1 <= len(shape) <= 2 or min(shape) < 0:
        raise FormatError(f"{path}: must hold numbers, [n] or [n, D]. Found: {list(shape)} of {dtype}.")
    if is_fortran and len(shape) == 2 and 1 not in shape:
        raise FormatError(f"{path}: is in Fortran order. Save it again with np.ascontiguousarray(array).")
    width = shape[1] if len(shape) == 2 else None
    if width == 0:
        raise FormatError(f"{path}: its rows have no numbers: {list(shape)}.")
    column = array_in(path, offset, dtype, width, "rows")
    if column.shape != shape:
        raise FormatError(
            f"{path}: its header says {list(shape)} of {dtype.name}, but {column.shape[0] * column.row_bytes} bytes "
            f"after byte {offset} are {list(column.shape)}. It was cut off, or something was added."
        )
    return column


def open_table(keys_path: str, values_path: str) -> StoredTable:
    """The table of two files."""
    return StoredTable(open_array(keys_path), open_array(values_path))


def new_columns(keys_path: str, values_path: str, key_dtype: np.dtype, dim: int, num_rows: int) -> list[NewColumn]:
    """The files to write for a table."""
    keys, rows = key_dtype.newbyteorder("<"), np.dtype("<f4")
    return [
        NewColumn(keys_path, _header(keys, (num_rows,)), keys),
        NewColumn(values_path, _header(rows, (num_rows, dim)), rows, dim),
    ]


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()
