"""`dump` and `load`: tables and optimizer slots in and out of files, as SOK v2 does it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import PathLike, StockOptimizer
from sok.compat.formats import v2
from sok.compat.formats.columns import StoredTable
from sok.compat.formats.dump import Dump, dump_tables
from sok.compat.formats.load import Load, load_tables
from sok.compat.formats.shard import Shard, destination, whole_shard
from sok.compat.formats.slots import OptimizerSlots
from sok.compat.formats.writing import NewColumn
from sok.compat.v2.rows import as_key_type
from sok.compat.v2.variable import StaticVariable
from sok.job import context
from sok.job.agreement import check_equal, done_by_all, together
from sok.job.job import job_of
from sok.optimizers import Optimizer
from sok.table.table import EmbeddingVariable, is_embedding_variable


def dump(
    path: PathLike,
    dump_vars: EmbeddingVariable | Sequence[EmbeddingVariable],
    optimizer: Optimizer | StockOptimizer | None = None,
    *,
    progress: bool | None = None,
) -> None:
    """Writes tables, and the slots of their optimizer, into a directory, which is made if missing.

    A table is in `NAME-key` and `NAME-weight`, a slot in `NAME-OPTIMIZER-SLOT`, byte for byte what SOK 2.1 writes
    (docs/old_formats.md). NAME is the variable's `name` with punctuation replaced by "_": "user:0" is in `user_0-key`.
    Rows are sorted by key within a worker. Rank 0 writes; a table that lives on one worker, that worker writes.

    Args:
        path: the directory.
        dump_vars: a `sok.Variable`, `sok.DynamicVariable` or other embedding variable, or a list or tuple of such.
        optimizer: what trains them: a `sok.OptimizerWrapper` (SGD, Adagrad, Adam, Adamax, Adadelta, Ftrl), a
            `sok.DistributedOptimizer` or one of `sok.optimizers`; also a list or tuple of one. Its slots are written if
            it has done a step, its step count is not: save that with the rest of the model. None: rows only.
        progress: whether to show how far the work is; None: if standard error is a terminal.

    Raises:
        TypeError, ValueError: an argument is not what it should be; a `DynamicVariable` has no rows; the optimizer has
            slots for some of the tables only.
        tf.errors.InvalidArgumentError: a table holds a key that its `key_type` does not.
        OSError: the files cannot be written. All on all workers; old files are as they were.
        RuntimeError: not executing eagerly. In a session use `sok.Saver` or `sok.save`.

    Collective. Do not train while it runs.

    Example:
        >>> import sok, tempfile
        >>> table, directory = sok.DynamicVariable(2, name="dumped"), tempfile.mkdtemp()
        >>> sok.assign(table, [7, -1], [[1.0, 2.0], [3.0, 4.0]])
        >>> sok.dump(directory, table)
        >>> sorted(name.split("-")[1] for name in os.listdir(directory))  # of rank 0: dumped_0-key, dumped_0-weight
        ['key', 'weight']
        >>> sok.assign(table, [7], [[0.0, 0.0]])
        >>> sok.load(directory, table)
        >>> sok.export(table)[1].numpy().tolist()
        [[3.0, 4.0], [1.0, 2.0]]

    Source: `dump` of SOK v2.
    """
    _check_eager("dump")
    transport = context.get_transport()
    prepared: list[Any] = []

    def prepare() -> tuple[list[str], str, list[bool]]:
        slots, variables = _optimizer(optimizer), _variables(dump_vars)
        prepared[:] = slots, variables, [_shard(variable) for variable in variables]
        have = [slots is not None and slots.has_state(variable) for variable in variables]
        return [variable.name for variable in variables], slots.name if slots else "none", have

    said = together(transport, "sok/dump", prepare)
    check_equal([given for *given, _ in said], "sok.dump: tables and optimizer")
    slots, variables, shards = prepared
    if _have_slots([have for *_, have in said], variables):
        shards = done_by_all(
            transport, "sok/dump", lambda: [dataclasses.replace(shard, slots=slots.read(shard)) for shard in shards]
        )
    dump_tables([_dump_of(os.fspath(path), shard, slots, progress) for shard in shards], "sok/dump")


def load(
    path: PathLike,
    load_vars: EmbeddingVariable | Sequence[EmbeddingVariable],
    optimizer: Optimizer | StockOptimizer | None = None,
    *,
    progress: bool | None = None,
) -> None:
    """Stores what `dump` (ours, or SOK's) has written, on any number of workers.

    Rows of a `sok.DynamicVariable` that are not in the files stay as they are; a `sok.Variable` takes all its rows.
    Every worker reads the files and stores the rows of its keys. Nothing is stored until all checks have passed for all
    tables on all workers.

    Args:
        path: the directory.
        load_vars: the tables, as `dump` takes them, with the names that they had then.
        optimizer: as `dump` takes it: its slots must be in the files. It need not have done a step.
        progress: as in `dump`.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        FileNotFoundError: a file is missing.
        FormatError (a ValueError): a file is cut off, its header makes no sense, sizes do not go together, rows are not
            as long as the table's, a key is there twice, or the table cannot hold it.
        tf.errors.ResourceExhaustedError: a worker has no room for its rows.
        RuntimeError: not executing eagerly. All on all workers.

    Collective.

    Example: see `dump`.

    Source: `load` of SOK v2.
    """
    _check_eager("load")

    def prepare() -> list[Load]:
        slots, variables = _optimizer(optimizer), _variables(load_vars)
        return [_load_of(os.fspath(path), variable, slots, progress) for variable in variables]

    load_tables(done_by_all(context.get_transport(), "sok/load", prepare), "sok/load")


def _check_eager(what: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"sok.{what} works when executing eagerly, not in a tf.function or a v1 graph. There use sok.Saver."
        )


def _variables(given: Any) -> list[EmbeddingVariable]:
    variables = list(given) if isinstance(given, (list, tuple)) else [given]
    for variable in variables:
        if not is_embedding_variable(variable):
            raise TypeError(
                f"sok.dump and sok.load take a sok.Variable, a sok.DynamicVariable, or a list. Received: {variable!r}."
            )
    names = [v2.file_name(variable.name) for variable in variables]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Two variables would share the file {name}-key. Give them names of their own.")
    if not variables:
        raise ValueError("sok.dump and sok.load take at least one variable. Received: none.")
    job_of(variables)
    return variables


def _optimizer(given: Any) -> OptimizerSlots | None:
    if isinstance(given, (list, tuple)):
        if len(given) > 1:
            raise ValueError(f"`optimizer` must be one optimizer. Received: {len(given)}.")
        given = given[0] if given else None
    return None if given is None else OptimizerSlots(given)


def _shard(variable: EmbeddingVariable) -> Shard:
    shard = whole_shard(variable, by_key=True)
    if isinstance(variable, StaticVariable):
        # SOK's choice: one kind of variable counts its rows with int64, the other with uint64.
        key_dtype = tf.int64 if variable.owner is None else tf.uint64
        return dataclasses.replace(shard, keys=tf.cast(shard.keys, key_dtype))
    return dataclasses.replace(shard, keys=as_key_type(shard.keys, variable))


def _have_slots(said: Sequence[Sequence[bool]], variables: Sequence[EmbeddingVariable]) -> bool:
    """Whether all tables have slots on some worker. `ValueError` if only some have."""
    have = np.any(said, axis=0)
    if have.any() and not have.all():
        without = [v.table_name for v, has in zip(variables, have, strict=True) if not has]
        raise ValueError(
            f"The optimizer has slots for some of the tables, but not for {', '.join(without)}. Dump those apart, "
            "without `optimizer`."
        )
    return bool(have.all())


def _dump_of(path: str, shard: Shard, slots: OptimizerSlots | None, show: bool | None) -> Dump:
    variable, name = shard.variable, v2.file_name(shard.variable.name)
    key_dtype = np.dtype(shard.keys.dtype.as_numpy_dtype)
    written = (slots.name, slots.slots) if slots and shard.slots else ("", ())

    def new_columns(num_rows: int) -> list[NewColumn]:
        if num_rows == 0:
            raise ValueError(f"table '{variable.table_name}' has no rows, and SOK cannot load a dump of none.")
        return v2.new_columns(path, name, key_dtype, variable.dim, num_rows, *written)

    return Dump(shard, new_columns, lambda: v2.obsolete_slots(path, name, *written), in_turns=True, show=show)


def _load_of(path: str, variable: EmbeddingVariable, slots: OptimizerSlots | None, show: bool | None) -> Load:
    names = slots.slots if slots else ()

    def open_files() -> StoredTable:
        return v2.open_table(path, v2.file_name(variable.name), slots.name if slots else "", names)

    store = functools.partial(slots.store, variable) if slots and names else None
    return Load(
        variable, destination(variable, complete=True), open_files, store=store, num_slots=len(names), show=show
    )
