"""The keys of a table that are counted and wait for rows, as a table of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.table.options import TableOptions
from sok.table.policies import CANDIDATES
from sok.table.table import EmbeddingVariable


class Candidates(EmbeddingVariable):
    """Keys of a table that are counted and have no row yet: rows [2] are their histories, as they lie in memory.

    A table for whatever moves whole tables to files and back. What is written here is counted in the table `of`.
    """

    def __init__(self, of: EmbeddingVariable) -> None:
        self._of = of
        options = of.options
        super().__init__(
            2,
            2**32 - 2,
            name=of.table_name + CANDIDATES,
            options=TableOptions(
                key_dtype=options.key_dtype, initializer="zeros", trainable=False, seed=0, placement=options.placement
            ),
        )

    def _make_handle(self, **_: Any) -> tf.Tensor:
        return _ops.lib().sok_table_candidates(self._of.handle)


def candidates_of(table: EmbeddingVariable) -> Candidates | None:
    """Its keys that wait for a row; None if its admission counts none."""
    admission = table.options.admission
    if admission is None or admission.after is None:
        return None
    found = vars(table).get("_candidates")
    if found is None:
        found = table._candidates = Candidates(table)
    return found


def with_candidates(tables: Mapping[str, EmbeddingVariable]) -> dict[str, EmbeddingVariable]:
    """Tables by the names that files have for them, and their keys that wait for rows, where there are any."""
    waiting = {name + CANDIDATES: candidates_of(table) for name, table in tables.items()}
    return {**tables, **{name: found for name, found in waiting.items() if found is not None}}
