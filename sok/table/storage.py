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
    """Keeps the rows of a table in a file, or in memory, and those in use in memory, or on a GPU.

    Results are those of a table without it, bit for bit; of one on a GPU, up to the order of sums.

    In memory are the index (16 to 24 bytes a key), 8 bytes a row, and a cache of rows; lookups and updates bring the
    rows of their keys into the cache first. The file has the rows that the cache has no room for. It is working memory,
    not a checkpoint: it goes with the table (docs/storage.md).

    Of a table on a GPU all rows are in the memory of the host, or in memory over a file, and those in use on the GPU as
    well.

    Args:
        memory_bytes: how much memory the table may take on each worker, the index and all buffers included. As the
            index grows, the cache shrinks. What is too little is refused with the least that the table needs. To be
            given with `path`; None: all rows are in memory.
        path: the folder of the file, on each worker's own disk; made if it is missing. A file takes up to about twice
            the bytes of all rows and their slots. On tmpfs it is memory again.
        tables: how many tables share `memory_bytes` and `gpu_bytes`: each table that is given this storage takes an
            equal part.
        gpu_bytes: how much memory of the GPU rows in use may take, if the table lies there. None: as much as
            `gpu_memory_bytes` of the table says, or the GPU has. Tables on the CPU pay it no attention.

    Raises:
        ValueError: an argument is out of range; `memory_bytes` and `path` are not given together; nothing is given.

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
        >>> sok.Storage(gpu_bytes=2**30)  # all rows in memory, those in use on a GPU
        Storage(gpu_bytes=1073741824)

    Source: the tables in persistent memory of OpenEmbedding, and the StorageOption of DeepRec.
    """

    memory_bytes: int | None = None
    path: str | os.PathLike[str] | None = None
    tables: int = 1
    gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        check_whole("tables", self.tables, 1, 2**20)
        for name in ("memory_bytes", "gpu_bytes"):
            value: Any = getattr(self, name)
            if value is None:
                continue
            check_whole(name, value, 1, 2**62)
            object.__setattr__(self, name, int(value))
            if int(value) < self.tables:
                raise ValueError(f"`{name}` is too little for {self.tables} tables. Received: {value}.")
        object.__setattr__(self, "tables", int(self.tables))
        if self.memory_bytes is None and self.path is None and self.gpu_bytes is not None:
            return
        path = os.fspath(self.path) if isinstance(self.path, (str, os.PathLike)) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise ValueError(f"`path` must be the name of a folder. Received: {self.path!r}.")
        if self.memory_bytes is None:
            raise ValueError(f"`memory_bytes` must be given with `path`. Received: {self!r}.")
        object.__setattr__(self, "path", path)

    @property
    def has_file(self) -> bool:
        """Whether rows lie in a file."""
        return self.path is not None

    def to_attributes(self) -> dict[str, Any]:
        """The attributes by which native ops know it."""
        attributes: dict[str, Any] = {}
        if self.path is not None:
            attributes["storage_memory_bytes"] = int(self.memory_bytes or 0) // self.tables
            attributes["storage_path"] = os.path.abspath(self.path)
        if self.gpu_bytes is not None:
            attributes["storage_device_bytes"] = self.gpu_bytes // self.tables
        return attributes

    def prepare(self, table: str) -> None:
        """Makes the folder if it is missing. `OSError`, which names both, where nothing can be written to it."""
        if self.path is None:
            return
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
