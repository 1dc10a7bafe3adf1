"""What leaves a table by its `eviction`: how many rows it keeps, and who is told of those that go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from sok.table import on_servers
from sok.table.options import TableOptions
from sok.table.state import watch_evicted

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable


def with_rows_counted(options: TableOptions, dim: int, capacity: int, world_size: int) -> TableOptions:
    """The options of a table whose capacity, or bytes, have become rows, if those that are over leave it."""
    if options.eviction is None or not options.eviction.when_full:
        return options
    on_each = options.placement.is_copied or options.placement.cuts_rows
    shards = 1 if on_each else options.placement.num_shards(world_size)
    rows = options.eviction.max_rows_of(dim, capacity, shards)
    eviction = dataclasses.replace(options.eviction, max_rows=rows, memory_bytes=None, slots=0)
    return dataclasses.replace(options, eviction=eviction)


class TellsEvicted:
    """The part of an `EmbeddingVariable` that hands over what leaves it."""

    evicted_to: Callable[[np.ndarray, np.ndarray], object] | None = None

    def on_evicted(self, function: Callable[[np.ndarray, np.ndarray], object] | None) -> None:
        """Hands over what `eviction` removes from this worker's shard. Not collective.

        Call it before functions that train the table are traced.

        Args:
            function: `f(keys, rows)`, called at the end of each step in which rows have left: keys [n] of the key
                dtype, ascending as 64-bit words, and their rows [n, local_dim] float32 as they were; NaN of one that
                its file has lost. None: nobody is told any more.

        Example:
            >>> import sok, tensorflow as tf
            >>> table = sok.EmbeddingVariable(2, 9, initializer="ones", eviction=sok.Eviction(norm_below=2.0, every=1))
            >>> table.on_evicted(lambda keys, rows: print(keys, rows))
            >>> with tf.GradientTape() as tape:
            ...     loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([7], tf.int64)))
            >>> sok.optimizers.SGD(0.5).apply_gradients([(tape.gradient(loss, table), table)])
            [7] [[0.5 0.5]]

        Raises:
            ValueError: the table has no `eviction`.
        """
        table = cast("EmbeddingVariable", self)
        if table.options.eviction is None:
            raise ValueError(f"Table '{table.table_name}' has no `eviction`: nothing leaves it.")
        on_servers.refuse(table, "on_evicted", "Rows leave on the servers, where no Python function is called.")
        self.evicted_to = function
        watch_evicted(table, function is not None)
