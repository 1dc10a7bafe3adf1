"""A table as a file that sok's serving library maps: what stands for it in a native export."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.saved_model.frozen_table import About, StandsForTable
from sok.saved_model.serving_file import Description, ServingFile, mixed_keys, unmixed_keys
from sok.saved_model.stock_ops import StockOps, as_written
from sok.table.table import EmbeddingVariable


class NativeTable(StandsForTable, tf.saved_model.experimental.TrackableResource):
    """A file of the SavedModel's assets, opened when the model is loaded.

    Args:
        table: what is exported.
        row_dtype: float32, float16 or int8.
        unseen_row: what keys without a row read as [D]; None: their initial values.
        path: of an empty file that TensorFlow takes for the asset; `NativeFiles` puts the real one in its place.
    """

    def __init__(self, table: EmbeddingVariable, row_dtype: tf.DType, unseen_row: np.ndarray | None, path: str) -> None:
        super().__init__()
        self._about = About(table, unseen_row)
        self.row_dtype = row_dtype
        self.file_name = os.path.basename(path)
        self._shared_name = f"sok_{uuid.uuid4().hex}"
        # Tracked by hand, as this class of TensorFlow's does not look at attributes: else the path would be a constant.
        self.asset = self._track_trackable(tf.saved_model.Asset(path), "asset")
        _ = self.resource_handle  # made here, outside of the functions that are traced

    @property
    def variables(self) -> list[tf.Variable]:
        return []

    @property
    def handles(self) -> list[tf.Tensor]:
        """What traced functions capture."""
        return [self.resource_handle]

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """The rows [..., D] float32 of `keys` [...]."""
        with self.scope():
            return _ops.serving_lib().sok_serving_lookup(self.resource_handle, keys, dim=self.table.dim)

    def open(self) -> tf.Operation:
        """What a server runs before the first lookup."""
        return _ops.serving_lib().sok_serving_open(self.resource_handle, self.asset.asset_path)

    def sorted_keys(self, words: np.ndarray) -> np.ndarray:
        in_order = unmixed_keys(np.sort(mixed_keys(self.wide(words))))
        return in_order.view(np.int64).astype(words.dtype)

    def description(self, source: str = "") -> Description:
        """What the file says of the table; `source`: where its rows are, if not there."""
        table, unseen = self.table, self.unseen_row
        return Description(
            name=table.table_name,
            dim=table.dim,
            row_dtype=self.row_dtype,
            key_dtype=table.key_dtype,
            hashed=table.hashed,
            seed=table.seed,
            unseen=table._initializer_spec if unseen is None else unseen,
            source=source,
        )

    def mixed(self, words: np.ndarray) -> np.ndarray:
        """The bits of keys [n] as the file has them."""
        return mixed_keys(self.wide(words))

    def wide(self, words: np.ndarray) -> np.ndarray:
        """64-bit words: signed keys sign-extended, unsigned ones zero-extended."""
        keys = words.view(self.table.key_dtype.as_numpy_dtype)
        return keys.astype(np.uint64 if self.table.key_dtype.is_unsigned else np.int64).view(np.uint64)

    # What TensorFlow asks of a resource.

    def _create_resource(self) -> tf.Tensor:
        # Where Python loads a model the mapping lives as long as the model; in a server's session, as long as that.
        counted = tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function
        return _ops.serving_lib().sok_serving_table(shared_name=self._shared_name, anonymous=counted)

    def _initialize(self) -> None:
        self.open()


@as_written
class NativeOps(StockOps):
    """Lookups as ops of sok's serving library; all else in stock ops."""

    def _pooled(self, tables: Sequence[Any], table_of: Sequence[int], combiners: Sequence[str], *ids: Any) -> Any:
        handles, dims = [table.resource_handle for table in tables], [table.table.dim for table in tables]
        settings = {"table_of": table_of, "dims": dims, "combiners": combiners}
        return _ops.serving_lib().sok_serving_group_lookup(handles, *ids, **settings)


class NativeFiles:
    """The files of a native export: first empty ones for TensorFlow, then what takes their place."""

    def __init__(self) -> None:
        self._placeholders: str | None = None
        self._count = 0
        self._folder = ""

    @property
    def rows(self) -> str | None:
        """Where rows are, if not in the files."""
        return None

    @property
    def settings(self) -> dict[str, int]:
        """What the next version has to know and the files do not say."""
        return {}

    def begin(self) -> None:
        """Before anything is written, where it is written."""

    def placed(self) -> None:
        """When servers can see the model."""

    def placeholder(self, table: EmbeddingVariable) -> str:
        """An empty file for a table, of a name of its own."""
        if self._placeholders is None:
            self._placeholders = tempfile.mkdtemp(prefix="sok_export_")
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", table.table_name)[:100]
        path = os.path.join(self._placeholders, f"{self._count}_{name}.sok")
        self._count += 1
        with open(path, "wb"):
            return path

    def put_into(self, saved_model: str) -> NativeFiles:
        """Says where the SavedModel lies whose assets these are, and adds the library to it."""
        self._folder = os.path.join(saved_model, "assets")
        extra = os.path.join(saved_model, "assets.extra")
        os.makedirs(extra, exist_ok=True)
        shutil.copy(_ops.serving_library_path(), extra)
        return self

    def writer(self, frozen: NativeTable, num_rows: int, words: np.ndarray | None) -> Any:
        """What takes the rows of a table, whose keys are `words` (None: all of an identity table)."""
        mixed = None if words is None else frozen.mixed(words)
        path = os.path.join(self._folder, frozen.file_name)
        return _Writer(ServingFile(path, frozen.description(), mixed, num_rows))

    def finish(self) -> None:
        """Nothing is left to be done: each file is whole."""

    def close(self) -> None:
        if self._placeholders is not None:
            shutil.rmtree(self._placeholders, ignore_errors=True)


class _Writer:
    def __init__(self, file: ServingFile) -> None:
        self._file = file
        self.num_bytes = 0

    def add(self, begin: int, values: dict[str, np.ndarray]) -> None:
        self._file.add(values["rows"], values.get("scales"))

    def finish(self) -> None:
        self.num_bytes = self._file.finish()

    def close(self) -> None:
        self._file.close()
