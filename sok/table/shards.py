"""The native tables behind one table: a handle for each part of its placement, and which of them is this worker's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.job.job import Job
from sok.table import on_servers
from sok.table import state as table_state
from sok.table.on_servers import OnServers
from sok.table.options import TableOptions
from sok.table.own_initializer import OwnInitializer
from sok.table.placement import Part

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """What a table has where it is placed.

    Args:
        options: of the table, with its placement.
        job: the workers that it is spread over.
        capacity: rows of one worker's shard.
        parts: of the placement.
        handles: of the native tables of the parts.
        own: the part of this worker.
        attributes: of its native table: what another table needs to hold the same rows.
        handle: of that; of a table on parameter servers what stands for it.
        on_servers: where its rows are; None: with workers.
    """

    options: TableOptions
    job: Job
    capacity: int
    parts: tuple[Part, ...]
    handles: list[tf.Tensor]
    own: Part
    attributes: dict[str, Any]
    handle: tf.Tensor
    on_servers: OnServers | None = None

    @classmethod
    def make(
        cls,
        table: EmbeddingVariable,
        options: TableOptions,
        job: Job,
        capacity: int,
        make_handle: Callable[..., tf.Tensor] | None = None,
    ) -> Shards:
        """Empty ones, for a table of which all else is known. `make_handle`: what makes each; None: the table does."""
        make_handle = make_handle or table.make_handle
        placement, dim, name = options.placement, table.dim, table.table_name
        if job.servers is not None:
            on_servers.check(options, isinstance(options.initializer, OwnInitializer))
        job.has_tables = True
        parts, own = placement.parts(dim, job.holders), placement.part_of(job.rank, dim, job.holders)
        graph_mode = not tf.executing_eagerly()
        eviction = options.eviction
        sizes = {"table": name, "capacity": eviction.room(capacity) if eviction else capacity, "seed": table.seed}
        common = {**sizes, **options.to_attributes(), **job.to_attributes()}
        if job.servers is not None:
            of_rows = table._initializer_spec.to_attributes(parts[0].columns, dim)
            attributes = {**common, "dim": dim, **parts[0].attributes, **of_rows}
            where, stand_in = on_servers.make(
                table, job.servers, attributes, lambda handle: table_state.set_handle_data(handle, dim, graph_mode)
            )
            return cls(options, job, capacity, parts, list(where.handles), own, where.attributes[0], stand_in, where)
        handles: list[tf.Tensor] = []
        for number, part in enumerate(parts):
            more = f"/{number}" if len(parts) > 1 else ""
            attributes = {
                **common,
                "dim": part.dim,
                **part.attributes,
                **table._initializer_spec.to_attributes(part.columns, dim),
            }
            with tf.device("/CPU:0") if options.on_host else contextlib.nullcontext():
                made = make_handle(
                    shared_name=f"sok/{name}{more}" if graph_mode else "",
                    anonymous=not graph_mode,
                    name=f"{name}{more}" if graph_mode else None,
                    **attributes,
                )
            table_state.set_handle_data(made, part.dim, graph_mode)
            handles.append(made)
            if part == own:
                own_attributes, handle = attributes, made
        return cls(options, job, capacity, parts, handles, own, own_attributes, handle)
