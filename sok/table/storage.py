"""Where a table keeps its rows: a property of a table. Knows no TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from sok.table.policies import check_whole


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Storage:
    """Keeps the rows of a table in a file, and those in use in memory. Results are those of a table in memory, bit for
    bit.

    In memory are the index (16 to 24 bytes a key), 8 bytes a row, and a cache of rows; lookups and updates bring the
    rows of their keys into the cache first. The file has the rows that the cache has no room for. It is working memory,
    not a checkpoint: it goes with the table (docs/storage.md).

    Args:
        memory_bytes: how much memory the table may take on each worker, the index and all buffers included. As the
            index grows, the cache shrinks. What is too little is refused with the least that the table needs.
        path: the folder of the file, on each worker's own disk; made if it is missing. A file takes up to about 1.5
            times the bytes of all rows and their slots. On tmpfs it is memory again.
        tables: how many tables share `memory_bytes`: each table that is given this storage takes an equal part.

    Raises:
        ValueError: an argument is out of range.

    Making a table with it raises OSError where nothing can be written to the folder.

    Example:
        >>> import sok, tempfile
        >>> import tensorflow as tf
        >>> storage = sok.Storage(memory_bytes=2**24, path=tempfile.mkdtemp())
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10**6, name="stored", initializer="ones", storage=storage)
        >>> table.sparse_read(tf.constant([7], tf.int64)).numpy().tolist()
        [[1.0, 1.0]]
        >>> table.stats()["misses"]
        0

    Source: the tables in persistent memory of OpenEmbedding, and the StorageOption of DeepRec.
    """

    memory_bytes: int
    path: str | os.PathLike[str]
    tables: int = 1

    def __post_init__(self) -> None:
        check_whole("memory_bytes", self.memory_bytes, 1, 2**62)
        check_whole("tables", self.tables, 1, 2**20)
        path = os.fspath(self.path) if isinstance(self.path, (str, os.PathLike)) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise ValueError(f"`path` must be the name of a folder. Received: {self.path!r}.")
        for name, value in ("memory_bytes", int(self.memory_bytes)), ("path", path), ("tables", int(self.tables)):
            object.__setattr__(self, name, value)
        if self.memory_bytes < self.tables:
            raise ValueError(f"`memory_bytes` is too little for {self.tables} tables. Received: {self.memory_bytes}.")

    def to_attributes(self) -> dict[str, Any]:
        """The attributes by which native ops know it."""
        return {"storage_memory_bytes": self.memory_bytes // self.tables, "storage_path": os.path.abspath(self.path)}

    def prepare(self, table: str) -> None:
        """Makes the folder if it is missing. `OSError`, which names both, where nothing can be written to it."""
        try:
            os.makedirs(self.path, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(b"\0")
        except OSError as error:
            words = f"`storage` of table {table!r}: nothing can be written to its folder: {error.strerror}"
            raise OSError(error.errno, words, os.path.abspath(self.path)) from error

    def get_config(self) -> dict[str, Any]:
        """What `Storage(**config)` makes it of again, for JSON."""
        return {f.name: said for f in dataclasses.fields(self) if (said := getattr(self, f.name)) != f.default}

    def __repr__(self) -> str:
        return f"Storage({', '.join(f'{name}={value!r}' for name, value in self.get_config().items())})"


def as_storage(value: object) -> Storage | None:
    """A table's `storage`, given as such or as its config."""
    if value is None or isinstance(value, Storage):
        return value
    if isinstance(value, Mapping):
        return Storage(**value)
    raise ValueError(f"`storage` must be None or a sok.Storage. Received: {value!r}.")
