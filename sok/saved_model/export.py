"""`export_saved_model`: a model with tables as a SavedModel that needs nothing but TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import fingerprinting_utils

import sok
from sok.base import log
from sok.base.types import Exportable, PathLike
from sok.job import context
from sok.job.agreement import check_equal, done_by_all, together
from sok.job.job import job_of
from sok.saved_model import rows as writing
from sok.saved_model.frozen_table import ROW_DTYPES, FrozenTable, SharedInitialRows, unseen_row
from sok.saved_model.initial_rows import initial_rows
from sok.saved_model.model import kind_of
from sok.saved_model.native_table import NativeFiles, NativeTable
from sok.saved_model.rows import Export
from sok.table import reading
from sok.table.table import EmbeddingVariable


@dataclasses.dataclass(frozen=True)
class TableReport:
    """How one table was exported.

    `largest_error` and `relative_error` (root mean square, over that of the values) say what `row_dtype` has cost; on
    other ranks than 0 they are 0.
    """

    name: str
    num_rows: int
    dim: int
    row_dtype: str
    num_bytes: int
    largest_error: float
    relative_error: float

    def __str__(self) -> str:
        text = (
            f"table '{self.name}': {self.num_rows:,} rows of {self.dim} as {self.row_dtype}, {self.num_bytes:,} bytes"
        )
        if self.row_dtype == "float32":
            return text
        return f"{text}; largest error {self.largest_error:.3g}, relative error {self.relative_error:.3g}"


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What `export_saved_model` has written, and where."""

    path: str
    signatures: tuple[str, ...]
    tables: tuple[TableReport, ...]


def export_saved_model(
    model: Exportable,
    path: PathLike,
    *,
    signatures: Any = None,
    row_dtype: str | None = None,
    default: str | float | Mapping[str, str | float] = "initial",
    native: bool = False,
    rows: str | None = None,
    overwrite: bool = False,
    drop_zero_rows: bool = False,
) -> ExportReport:
    """Writes a model as a SavedModel of stock ops, which TensorFlow Serving and any TensorFlow load without `sok`.

    Each table becomes its rows and, if it is hashed, its sorted keys: variables that stock ops search and gather. A
    table that several features share is stored once. The model answers as with training=False: no row is made.

    With `native` each table becomes a file among the model's assets that a server maps instead of loading, so that it
    starts at once and all its processes share one copy. Then lookups are ops of `libsok_serving.so`, which the server
    must load; the export has it, in `assets.extra`.

    With `rows` the rows of tables go to a Redis server or cluster, as a version of their own, for tables that are
    larger than a host. Lookups are the ops of a native export. The model reads its own version alone; it is
    readable when this returns, and older ones are removed after a grace (docs/redis.md).

    Args:
        model: a Keras 3 or tf_keras model, a tf.Module that can be called, or a function; with layers of ours,
            `sok.group_embedding_lookup_sparse`, `sok.lookup_sparse` or any other lookup of ours inside. Of a v1 graph
            its session, or MonitoredSession.
        path: the folder to write, such as '/models/ctr/1'; for several workers, one that rank 0 can write.
        signatures: what to serve. None: what the model itself says it takes (functional and Sequential Keras models,
            tf_keras models that have been called, a tf.Module whose `__call__` is a tf.function with an
            input_signature). A tf.TensorSpec, tf.SparseTensorSpec or tf.RaggedTensorSpec, or a nest of them: what
            `model` is called with. A dict from names to tf.functions with an input_signature, or to pairs (function,
            specs of its arguments): several signatures. Of a session: a dict from names to pairs (inputs, outputs) of
            dicts from names to tensors of its graph.
        row_dtype: None (float32), 'float16' or 'int8' (with a float32 scale for each row): how rows are stored. What
            that costs in accuracy is told (logger `sok`). Sums are made in float32.
        default: what keys without a row read as. 'initial': the row they would get, as `training=False` does in `sok`.
            'mean': the mean of the initializer. 'zeros'. A number: all elements. Or a dict from table names to these,
            where tables that are not named have 'initial'. Identity tables have a row for each legal key.
        native: whether lookups may be ops of ours, for tables that are too large for each process to load.
        rows: where rows go, if not to `path`: 'redis://user@host:6379,host2:6379/0?prefix=ctr&timeout_ms=1000'. The
            settings, and where the password is read from, are in docs/redis.md.
        overwrite: whether to replace what is at `path`, when the new model is whole.
        drop_zero_rows: whether rows of hashed tables that are zero, as `sok.optimizers.GroupFtrl` makes them, are left
            out. They read as before, since `default` must be 'zeros' (or 0) for these tables. Reads all rows twice.

    Returns:
        An `ExportReport`, on all workers. Signatures take and give plain tensors: see docs/export.md for their names.

    Raises:
        TypeError, ValueError: `model`, `signatures`, `row_dtype` or `default` is not one of these; `drop_zero_rows`
            where keys without a row do not read as zeros; ops that only `sok` has are left in the model (they are
            named); `native` or `rows` with a `path` that is not of the local file system; `rows` is no such URL.
        ImportError: `rows` without redis-py.
        FileExistsError: there is something at `path`.
        RuntimeError: inside a function, or while a v1 graph is built, without its session; `rows` where the library was
            built without hiredis.
        OSError, tf.errors.OpError: writing failed, or Redis did. What was at `path` is as it was.

    Collective: all workers call it, and all raise if one does. Rows travel and are written piece by piece; rank 0 needs
    memory for the keys of one table and some 150 MB.

    Example:
        >>> import tempfile
        >>> import sok, tensorflow as tf
        >>> table = sok.EmbeddingVariable(2, 100, name="exported", initializer="ones")
        >>> table.assign([7], [[3.0, 4.0]])
        >>> class Model(tf.Module):
        ...     def __call__(self, ids):
        ...         return sok.lookup_sparse(table, ids, combiners="sum")
        >>> path = tempfile.mkdtemp() + "/1"
        >>> report = sok.export_saved_model(Model(), path, signatures=tf.TensorSpec([None, None], tf.int64, "ids"))
        >>> print(report.tables[0])
        table 'exported': 1 rows of 2 as float32, 16 bytes
        >>> served = tf.saved_model.load(path).signatures["serving_default"]
        >>> served(ids=tf.constant([[7, 7], [7, 8]], tf.int64))["output_0"].numpy().tolist()
        [[6.0, 8.0], [4.0, 5.0]]

    Source: the role of `save_as_original_model` of OpenEmbedding, which cannot export hashed tables.
    """
    if kind_of(model).is_eager and not tf.executing_eagerly():
        raise RuntimeError(
            "sok.export_saved_model must be called eagerly and outside of functions, or with the session of a v1 graph."
        )
    files = _files_of(native, rows)
    with contextlib.nullcontext() if files is None else contextlib.closing(files):
        export_path, names, tables = _exported(
            model, path, signatures, row_dtype, default, files, overwrite, drop_zero_rows
        )
    if context.rank() == 0 and row_dtype is not None:
        # What rows have lost, nobody should have to ask for.
        log.logger.warning("%s", "\n".join(map(str, tables)))
    log.logger.info("Exported %d tables to %s.", len(tables), export_path)
    return ExportReport(export_path, names, tables)


def _files_of(native: bool, rows: str | None) -> NativeFiles | None:
    if rows is not None:
        from sok.saved_model.redis_place import place_of
        from sok.saved_model.redis_rows import RedisFiles

        return RedisFiles(place_of(rows))
    return NativeFiles() if native else None


def _names_of(tables: list[EmbeddingVariable]) -> list[str]:
    if tables:
        job_of(tables)
    return [table.table_name for table in tables]


def _exported(
    model: Exportable,
    path: PathLike,
    signatures: Any,
    row_dtype: str | None,
    default: Any,
    files: NativeFiles | None,
    overwrite: bool,
    drop_zero_rows: bool,
) -> tuple[str, tuple[str, ...], tuple[TableReport, ...]]:
    """Where the model was written, and the names of its signatures."""
    transport = context.get_transport()
    is_writer = transport.rank == 0

    def prepare() -> tuple[str, Export]:
        folder = os.fspath(path).rstrip("/")
        if is_writer:
            _check_path(folder, overwrite)
        if files is not None and "://" in folder:
            raise ValueError(f"`native` and `rows` need a path of the local file system. Received: {folder!r}.")
        export = _prepared(model, signatures, _row_dtype(row_dtype), default, files, drop_zero_rows)
        reading.tell_untrained([frozen.table for frozen in export.tables])
        if files is not None and is_writer:
            files.begin()
        return folder, export

    def put_in_place() -> None:
        if target is not None:
            target.finish()
            _write_description(partial, tables, files, export.dense_places)
            fingerprinting_utils.write_fingerprint(partial)
            _put_in_place(partial, folder, overwrite)
            if files is not None:
                files.placed()

    folder, export = done_by_all(transport, "sok/export/trace", prepare)
    names = together(transport, "sok/export/tables", lambda: _names_of([frozen.table for frozen in export.tables]))
    check_equal(names, "sok.export_saved_model: the tables of the model, in order of use,")
    partial = f"{folder}.partial-{os.getpid()}"
    try:
        target = done_by_all(transport, "sok/export/save", lambda: export.save(partial) if is_writer else None)
        tables = done_by_all(transport, "sok/export/rows", lambda: _write_rows(export, target, drop_zero_rows))
        # Only now: a worker may have failed to send its rows.
        done_by_all(transport, "sok/export/place", put_in_place)
    finally:
        if is_writer and tf.io.gfile.exists(partial):
            tf.io.gfile.rmtree(partial)
    return folder, export.names, tables


def _row_dtype(row_dtype: Any) -> tf.DType:
    if not isinstance(row_dtype, (str, type(None))) or row_dtype not in ROW_DTYPES:
        raise ValueError(f"`row_dtype` must be None, 'float32', 'float16' or 'int8'. Received: {row_dtype!r}.")
    return ROW_DTYPES[row_dtype]


def _check_path(path: str, overwrite: bool) -> None:
    if tf.io.gfile.exists(path) and not overwrite:
        raise FileExistsError(f"There is something at {path}. Choose another path, or pass overwrite=True.")


def _prepared(
    model: Exportable,
    signatures: Any,
    row_dtype: tf.DType,
    default: Any,
    files: NativeFiles | None,
    drop_zero_rows: bool,
) -> Export:
    """The model in stock ops or, with `files`, in those of a native export, and what it needs."""
    # By table name; None: of all others.
    defaults = {None: "initial", **default} if isinstance(default, dict) else {None: default}
    kind = kind_of(model)
    initial = SharedInitialRows() if kind.is_eager else initial_rows

    def freeze(table: EmbeddingVariable) -> FrozenTable | NativeTable:
        reads_as = defaults.get(table.table_name, defaults[None])
        unseen = unseen_row(table, reads_as)
        if drop_zero_rows and table.num_keys is None and (unseen is None or unseen.any()):
            raise ValueError(
                f"`drop_zero_rows` needs default='zeros', of table '{table.table_name}' too: the keys of rows that are "
                f"left out read as keys without a row do. Received: default={reads_as!r}."
            )
        if files is not None:
            return NativeTable(table, row_dtype, unseen, files.placeholder(table))
        return FrozenTable(table, row_dtype, unseen, initial)

    export = kind(model, signatures, freeze, files)
    names = {frozen.table.table_name for frozen in export.tables}
    unknown = sorted(name for name in defaults if name is not None and name not in names)
    if unknown:
        raise ValueError(f"`default` names tables {unknown} that the model does not look up. Known: {sorted(names)}.")
    return export


def _write_rows(export: Export, target: writing.Target | None, drop_zero_rows: bool) -> tuple[TableReport, ...]:
    reports, failure = [], None
    for frozen in export.tables:
        written, failed = writing.write(export, frozen, target if failure is None else None, drop_zero_rows)
        failure = failure or failed
        table, loss = frozen.table, written.loss
        losses = (loss.largest_error, loss.relative)
        about = (table.table_name, written.num_rows, table.dim, frozen.row_dtype.name, written.num_bytes)
        reports.append(TableReport(*about, *losses))
    if failure is not None:
        raise failure
    return tuple(reports)


def _write_description(
    folder: str, tables: tuple[TableReport, ...], files: NativeFiles | None, dense: dict[str, str] | None
) -> None:
    """What `sok inspect` says of the tables, and `follow_export` needs: the model itself does not name them."""
    told: dict[str, Any] = {"sok_version": sok.__version__, "native": files is not None}
    if files is not None and dense is not None:
        told["dense"] = dense
    if files is not None and files.rows is not None:
        told |= {"rows": files.rows, "settings": files.settings}
    told["tables"] = [dataclasses.asdict(table) for table in tables]
    tf.io.gfile.makedirs(os.path.join(folder, "assets.extra"))
    with tf.io.gfile.GFile(os.path.join(folder, "assets.extra", "sok.json"), "w") as file:
        file.write(json.dumps(told, indent=2))


def _put_in_place(folder: str, path: str, overwrite: bool) -> None:
    """Renames `folder` to `path`; what was there before goes when the new one is in its place."""
    _check_path(path, overwrite)  # again: writing may have taken long
    old = f"{path}.old-{uuid.uuid4().hex[:8]}"
    was_there = tf.io.gfile.exists(path)
    if was_there:
        tf.io.gfile.rename(path, old)
    try:
        tf.io.gfile.rename(folder, path)
    except BaseException:
        if was_there:
            tf.io.gfile.rename(old, path)
        raise
    if was_there:
        with contextlib.suppress(tf.errors.OpError):  # the new one is in place: what is left is only in the way
            tf.io.gfile.rmtree(old)
