"""Rows in a file and checkpoints that leave them there, where OpenEmbedding has persistent memory: `sok.Storage`."""

from __future__ import annotations

import os
from typing import Any

import sok
from openembedding import flags
from sok.base import _ops
from sok.base.types import KerasModel
from sok.checkpoint import store_files
from sok.checkpoint.arguments import tables_of
from sok.job import context
from sok.job.agreement import together
from sok.optimizers import Optimizer
from sok.table import on_servers
from sok.table.options import TableOptions

_CACHE_MEGABYTES = 1024  # OpenEmbedding's own default
_under_way: dict[int, Any] = {}  # by id of a model: its save that goes on, or was the last
_steps: dict[int, list[int]] = {}  # by id of a model: of its tables, when it was persisted last


def table_options(tables: int = 1) -> TableOptions | None:
    """How tables are made that share the memory of `flags.config`; None: it names no folder for their rows.

    Raises:
        ValueError: `flags.config` is no YAML or JSON of the form `{"server": {"pmem_pool_root_path": ..., ...}}`.
    """
    if not flags.config:
        return None
    import yaml  # type: ignore[import-untyped] # Horovod's, and not needed without such a config

    words = "openembedding.flags.config must be YAML or JSON of one mapping of mappings, as '{\"server\": {...}}'."
    try:
        config = yaml.safe_load(flags.config)
    except yaml.YAMLError as error:
        raise ValueError(f"{words} Received: {flags.config!r}: {error}") from error
    server = config.get("server") or {} if isinstance(config, dict) else None
    if not isinstance(server, dict):
        raise ValueError(f"{words} Received: {flags.config!r}.")
    path, size = server.get("pmem_pool_root_path") or "", server.get("cache_size", _CACHE_MEGABYTES)
    if not path:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"openembedding.flags.config: `cache_size` must be whole megabytes. Received: {size!r}.")
    return TableOptions(storage=sok.Storage(memory_bytes=size << 20, path=path, tables=max(1, tables)))


def should_persist(model: KerasModel) -> bool:
    """Whether memory is full of rows of one of the model's tables, and it was trained since it was persisted last."""
    last = _under_way.get(id(model))
    if last is not None and not last.done():
        return False
    tables = _tables_of(model)
    if _steps.get(id(model), [0] * len(tables)) == [int(table.step) for table in tables]:
        return False
    return any(_is_full(table) for table in tables if table.options.storage is not None)


def persist(model: KerasModel, path: str, window: int, optimizer: Optimizer | None) -> None:
    """A save by version, which with a window goes on beside training; not of tables on servers."""
    if window not in (0, 1, 2):
        raise ValueError(f"`persist_pending_window` must be 0, 1 or 2. Received: {window!r}.")
    last = _under_way.pop(id(model), None)
    if last is not None:
        last.result()
    saving = sok.save(path, model, optimizer, versions=True, asynchronous=window > 0 and context.servers() is None)
    if saving is not None:
        _under_way[id(model)] = saving
    _steps[id(model)] = [int(table.step) for table in _tables_of(model)]


def wait(model: KerasModel) -> None:
    """Until what `persist` began is complete; raises what went wrong."""
    if (last := _under_way.pop(id(model), None)) is not None:
        last.result()


def save_dense(model: KerasModel, path: str) -> None:
    """Worker 0 writes the weights that are in no table. Collective."""

    def write() -> None:
        if context.rank() == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with store_files.leaving_rows_out():
                model.save_weights(path)

    together(context.get_transport(), "openembedding/save_dense", write)


def load_dense(model: KerasModel, path: str) -> None:
    """All workers read what `save_dense` has written. Collective."""

    def read() -> None:
        with store_files.leaving_rows_out():
            model.load_weights(path)

    together(context.get_transport(), "openembedding/load_dense", read)


def _tables_of(model: KerasModel) -> list[Any]:
    return list(tables_of(model).values())


def _is_full(table: Any) -> bool:
    sizes = [_ops.lib().sok_table_storage(shard.handle).numpy().tolist() for (shard,) in on_servers.held([table])]
    return any(rows_in_memory >= most for rows_in_memory, most, *_ in sizes)
