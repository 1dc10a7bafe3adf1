"""What a table counts of keys that have no row yet, as a table of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.table.options import TableOptions
from sok.table.placement import NUM_BUCKETS
from sok.table.table import EmbeddingVariable


class Counted(EmbeddingVariable):
    """What a table counts of keys without rows. Rows [2] of candidates are their histories, as they lie in memory;
    those of a Bloom filter are the cells of a bucket, under a key of it.

    A table for whatever moves whole tables to files and back. What is written here is counted in the table `of`.
    """

    def __init__(self, of: EmbeddingVariable, name: str) -> None:
        self._handle_of = of.handle
        cells = of.options.to_attributes().get("admit_cells", 0)
        options = TableOptions(
            key_dtype="uint64" if cells else of.options.key_dtype,
            initializer="zeros",
            trainable=False,
            seed=0,
            placement=of.options.placement,
        )
        super().__init__(cells // 4 or 2, NUM_BUCKETS if cells else 2**32 - 2, name=name, options=options)
        self._attributes["always_on_host"] = True  # of a `second_table`; beside a table on a GPU, too

    def make_handle(self, **_: Any) -> tf.Tensor:
        return _ops.lib().sok_table_counted(self._handle_of)


def with_counted(tables: Mapping[str, EmbeddingVariable]) -> dict[str, EmbeddingVariable]:
    """Tables by the names that files have for them, and what is counted of keys without rows, where that is."""
    found: dict[str, EmbeddingVariable] = dict(tables)
    for name, table in tables.items():
        apart = table.options.admission.counts_apart if table.options.admission else ""
        if not apart:
            continue
        if "_counted" not in vars(table):
            graph = table.handle.graph if table._in_graph_mode else None
            with graph.as_default() if graph else contextlib.nullcontext(), tf.control_dependencies(None):
                table._counted = Counted(table, table.table_name + apart)
        found[name + apart] = table._counted
    return found
