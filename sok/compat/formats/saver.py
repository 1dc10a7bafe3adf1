"""`Saver`: tables in and out of files, as SOK v1 does it."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import PathLike, TensorLike
from sok.compat.formats import v1
from sok.compat.formats.columns import ArrayColumn, RangeColumn, StoredTable
from sok.compat.formats.dump import Dump, dump_tables
from sok.compat.formats.graphs import run_or_build
from sok.compat.formats.load import Load, load_tables
from sok.compat.formats.shard import checked_shard, destination
from sok.table.table import EmbeddingVariable, checked_table


class Saver:
    """Writes and reads the files of SOK v1: keys and rows of one table, without optimizer state.

    A table of name NAME is in `NAME_keys.file` and `NAME_values.file` of a directory (docs/old_formats.md). Files are
    byte for byte what SOK writes, and may be restored on another number of workers. For everything that a training
    has, also optimizer slots, and with checks of what the disk gives back, use `sok.save`.

    All methods are collective. Eagerly they do their work and give 'OK'; in a v1 graph, or inside a `tf.function`, they
    give a string tensor: run it. Do not train while they run.

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(dim=2, capacity=8, name="saver_example")
        >>> saver, directory = sok.Saver(), tempfile.mkdtemp()
        >>> saver.load_embedding_values(table, [[[1.0, 2.0]], [[3.0, 4.0]]]).numpy()
        b'OK'
        >>> saver.dump_to_file(table, directory).numpy()
        b'OK'
        >>> sorted(os.listdir(directory))
        ['saver_example_keys.file', 'saver_example_values.file']
        >>> _ = table.erase([0, 1])
        >>> saver.restore_from_file(table, directory).numpy()
        b'OK'
        >>> table.sparse_read([1]).numpy().tolist()
        [[3.0, 4.0]]

    Source: `Saver` of SOK v1.
    """

    def dump_to_file(
        self, embedding_variable: EmbeddingVariable, filepath: PathLike, *, progress: bool | None = None
    ) -> tf.Tensor:
        """Writes a table into a directory, which is made if missing. Rank 0 writes.

        Rows of worker 0 come first, then those of worker 1, ...; inside a worker in the order in which they were made.
        Of a table without hashing all rows are written, whether or not they are in use.

        Args:
            embedding_variable: the table.
            filepath: the directory.
            progress: whether to show how far the work is; None: if standard error is a terminal.

        Returns:
            'OK', a string scalar.

        Raises:
            TypeError: `embedding_variable` is no table.
            OSError: the files cannot be written. On all workers; old files are as they were.
            tf.errors.InvalidArgumentError: the same, in a graph.
        """
        variable, directory = _checked(embedding_variable), os.fspath(filepath)
        key_dtype = np.dtype(variable.key_dtype.as_numpy_dtype)

        def program() -> tf.Tensor:
            name = f"sok/{variable.table_name}/dump"
            shard = checked_shard(variable, name)
            columns = functools.partial(v1.new_columns, directory, variable.table_name, key_dtype, variable.dim)
            return _ok(dump_tables([Dump(shard, columns, show=progress)], name))

        return run_or_build(program)

    def restore_from_file(
        self, embedding_variable: EmbeddingVariable, filepath: PathLike, *, progress: bool | None = None
    ) -> tf.Tensor:
        """Stores the rows that `dump_to_file` (ours, or SOK's) has written. Rows not in the files stay as they are.

        Every worker reads the files and stores the rows of its keys, however many workers wrote them. Nothing is
        stored until all checks have passed on all workers.

        Args:
            embedding_variable: a table with the name and the dim that the files have. Its key dtype may differ.
            filepath: the directory.
            progress: as in `dump_to_file`.

        Returns:
            'OK', a string scalar.

        Raises:
            FileNotFoundError: a file is missing.
            FormatError (a ValueError): a file is empty or cut off, the sizes of the two do not go together, a key is
                there twice, or the table cannot hold it.
            tf.errors.ResourceExhaustedError: a worker has no room for its rows.
            tf.errors.InvalidArgumentError: any of these, in a graph. All on all workers.
        """
        variable, directory = _checked(embedding_variable), os.fspath(filepath)
        key_dtype = np.dtype(variable.key_dtype.as_numpy_dtype)

        def open_files() -> StoredTable:
            return v1.open_table(directory, variable.table_name, variable.dim, key_dtype)

        return _load(variable, open_files, [], "restore", progress)

    def load_embedding_values(self, embedding_variable: EmbeddingVariable, tensors: TensorLike) -> tf.Tensor:
        """Stores row i of a matrix under key i.

        Args:
            embedding_variable: the table.
            tensors: [n, D] float32, or a list or tuple of such, which are stacked. The same on all workers; each keeps
                the rows of its keys. n is at most what the table of all workers has room for.

        Returns:
            'OK', a string scalar.

        Raises:
            ValueError: there are no rows, or they are not [n, D].
            tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError: as `restore_from_file`.
        """
        variable = _checked(embedding_variable)
        matrix = _stacked(tensors, variable)

        def open_matrix(matrix: np.ndarray) -> StoredTable:
            if not len(matrix):
                raise ValueError("`tensors` must have rows. Received: none.")
            return StoredTable(RangeColumn(len(matrix)), ArrayColumn("tensors", matrix))

        return _load(variable, open_matrix, [matrix], "load_values", False)


def _load(variable: EmbeddingVariable, opened: Any, inputs: Sequence[Any], what: str, progress: bool | None) -> Any:
    def program() -> tf.Tensor:
        load = Load(variable, destination(variable), opened, inputs, show=progress)
        return _ok(load_tables([load], f"sok/{variable.table_name}/{what}"))

    return run_or_build(program)


def _ok(done: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([done]):
        return tf.constant("OK")


def _checked(variable: Any) -> EmbeddingVariable:
    kinds = "an embedding variable, such as `layer.embedding_variable`"
    return checked_table(variable, "embedding_variable", kinds)


def _stacked(tensors: Any, variable: EmbeddingVariable) -> tf.Tensor:
    parts = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    parts = [tf.convert_to_tensor(part, tf.float32) for part in parts]
    for part in parts:
        if part.shape.rank is not None and (part.shape.rank != 2 or part.shape[1] not in (None, variable.dim)):
            raise ValueError(
                f"table '{variable.table_name}': each tensor must be [n, {variable.dim}]. Received: {part.shape}."
            )
    if not parts or sum(part.shape[0] or 0 for part in parts) == 0 and all(part.shape[0] == 0 for part in parts):
        raise ValueError("`tensors` must have rows. Received: none.")
    return tf.concat(parts, 0)
