"""This worker's share of a table, as what goes into files: keys, and rows piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from sok.base import _ops
from sok.compat.formats.destination import Destination
from sok.compat.v2.variable import StaticVariable
from sok.job.agreement import done_by_all
from sok.job.job import job_of
from sok.table import on_servers
from sok.table.table import EmbeddingVariable


@dataclass(frozen=True)
class Shard:
    """Rows to be written, in order. They are looked up when their turn comes: no copy of the table is in memory.

    Args:
        variable: the table.
        keys: [n], of the dtype that files are to have.
        slots: optimizer slots, each [n, D], in the order of `keys`.
    """

    variable: EmbeddingVariable
    keys: tf.Tensor  # [n]
    slots: Sequence[tf.Tensor] = ()

    def rows(self, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        """[stop - start, D], or the columns that this worker holds."""
        keys = tf.cast(self.keys[start:stop], self.variable.key_dtype)
        return _ops.lib().sok_table_lookup(self.variable.handle, keys, False, dim=self.variable.local_dim)[0]


def whole_shard(variable: EmbeddingVariable, by_key: bool) -> Shard:
    """All rows of this worker. Of a table without hashing those that are not in use too, with their initial values.

    Args:
        by_key: sorted by key. Otherwise in the order in which rows were made, which is the same in every run.
    """
    on_servers.refuse(variable, "A file of another system", on_servers.BY_CHECKPOINT)
    if variable.num_keys is None:
        keys = _ops.lib().sok_table_keys(variable.handle, key_dtype=variable.key_dtype)
        by_key = by_key or variable.placement.cuts_rows  # the order of all who have columns of them
        return Shard(variable, tf.sort(keys) if by_key else keys)
    own = variable.placement.local_keys(variable.num_keys, variable.rank, variable.world_size)
    return Shard(variable, tf.cast(tf.range(*own, dtype=tf.int64), variable.key_dtype))


def checked_shard(variable: EmbeddingVariable, name: str) -> Shard:
    """`whole_shard`, which fails on all workers if on one. In a graph nothing runs before the first collective."""
    if not tf.executing_eagerly():
        return whole_shard(variable, by_key=False)
    return done_by_all(job_of([variable]).transport, f"{name}/shard", lambda: whole_shard(variable, by_key=False))


def destination(variable: EmbeddingVariable, complete: bool = False) -> Destination:
    """What must be known of a table before rows are put in. `complete`: a `sok.Variable` takes all its rows or none."""
    on_servers.refuse(variable, "A file of another system", on_servers.FROM_CHECKPOINT)
    return Destination(
        name=variable.table_name,
        dim=variable.dim,
        key_dtype=variable.key_dtype.as_numpy_dtype().dtype,
        capacity=variable.capacity,
        num_keys=variable.num_keys,
        rank=variable.rank,
        world_size=variable.world_size,
        placement=variable.placement,
        complete=complete and isinstance(variable, StaticVariable),
    )
