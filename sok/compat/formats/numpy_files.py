"""`save_npy` and `load_npy`: tables in and out of NumPy's files."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import PathLike
from sok.compat.formats import npy
from sok.compat.formats.columns import ArrayColumn, Column, RangeColumn, StoredTable
from sok.compat.formats.dump import Dump, dump_tables
from sok.compat.formats.graphs import run_or_build
from sok.compat.formats.load import Load, load_tables
from sok.compat.formats.shard import checked_shard, destination
from sok.table.table import EmbeddingVariable, checked_table


def save_npy(variable: EmbeddingVariable, keys: PathLike, values: PathLike, *, progress: bool | None = None) -> Any:
    """Writes the rows of all workers into two `.npy` files, which `np.load` and `sok.load_npy` read.

    Rank 0 writes, and asks the others for their rows piece by piece. Optimizer slots are not written.

    Args:
        variable: any embedding variable. Of one without hashing all rows are written, whether or not they are in use.
        keys: path of the file of keys [n]: int64, int32, uint32 or uint64, as the table has them.
        values: path of the file of rows [n, D], float32. The i-th belongs to the i-th key; keys are in no order.
        progress: whether to show how far the work is; None: if standard error is a terminal.

    Returns:
        None; in a graph a tensor to run.

    Raises:
        TypeError: `variable` is no embedding variable.
        OSError: the files cannot be written. On all workers; old files are as they were.

    Collective. Do not train while it runs.

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(dim=1, capacity=8, name="npy_example")
        >>> table.assign([5, 3], [[0.5], [0.25]])
        >>> keys, values = (os.path.join(tempfile.mkdtemp(), name) for name in ("keys.npy", "values.npy"))
        >>> sok.save_npy(table, keys, values)
        >>> np.load(keys).tolist(), np.load(values).tolist()
        ([5, 3], [[0.5], [0.25]])
        >>> twice = sok.EmbeddingVariable(dim=1, capacity=8, name="npy_example_2")
        >>> sok.load_npy(twice, keys, np.load(values, mmap_mode="r") * 2)
        >>> twice.sparse_read([3, 5]).numpy().tolist()
        [[0.5], [1.0]]
    """
    checked_table(variable, "variable")
    keys, values = os.fspath(keys), os.fspath(values)
    key_dtype = np.dtype(variable.key_dtype.as_numpy_dtype)

    def program() -> tf.Tensor:
        name = f"sok/{variable.table_name}/save_npy"
        shard = checked_shard(variable, name)
        columns = functools.partial(npy.new_columns, keys, values, key_dtype, variable.dim)
        return dump_tables([Dump(shard, columns, show=progress)], name)

    return _none_if_done(run_or_build(program))


def load_npy(
    variable: EmbeddingVariable,
    keys: PathLike | np.ndarray | None,
    values: PathLike | np.ndarray,
    *,
    progress: bool | None = None,
) -> Any:
    """Stores rows that lie in `.npy` files or arrays. Rows of other keys stay as they are.

    Every worker reads all of it in pieces of about 16 MiB, and stores the rows of its keys: files may be larger than
    the memory of a worker. Nothing is stored until all checks have passed on all workers.

    Args:
        variable: any embedding variable.
        keys: [n] integers: path of a `.npy` file, or an array, also a mapped one. None: row i has key i.
        values: [n, D] float32, float16 or float64, likewise; stored as float32.
        progress: whether to show how far the work is; None: if standard error is a terminal.

    Returns:
        None; in a graph a tensor to run.

    Raises:
        TypeError: `variable` is no embedding variable.
        FileNotFoundError: a file is missing.
        FormatError (a ValueError): a file is no `.npy` file, is cut off, or is in Fortran order; lengths or widths do
            not fit; a key is there twice, or the table cannot hold it.
        tf.errors.ResourceExhaustedError: a worker has no room for its rows.
        tf.errors.InvalidArgumentError: any of these, in a graph. All on all workers.

    Collective: all workers pass the same.

    Example: see `save_npy`.
    """
    checked_table(variable, "variable")

    def open_all() -> StoredTable:
        rows = _column("values", values)
        return StoredTable(RangeColumn(rows.shape[0]) if keys is None else _column("keys", keys), rows)

    def program() -> tf.Tensor:
        load = Load(variable, destination(variable), open_all, show=progress)
        return load_tables([load], f"sok/{variable.table_name}/load_npy")

    return _none_if_done(run_or_build(program))


def _column(name: str, given: Any) -> Column:
    if isinstance(given, (str, os.PathLike)):
        return npy.open_array(os.fspath(given))
    return ArrayColumn(name, given if isinstance(given, np.ndarray) else np.asarray(given))


def _none_if_done(result: tf.Tensor) -> tf.Tensor | None:
    return None if tf.executing_eagerly() else result
