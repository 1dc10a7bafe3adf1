"""Random tables, plans and batches for collections of embedding layers, and NumPy's answers for the whole batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

import sok


@dataclasses.dataclass(frozen=True)
class Table:
    rows: int
    dim: int
    combiner: str | None


def tables_of(random: np.random.Generator, most: int = 5) -> list[Table]:
    return [
        Table(int(random.integers(1, 30)), int(random.integers(1, 7)), random.choice([None, "sum", "mean"]))
        for _ in range(random.integers(1, most + 1))
    ]


def placement_of(random: np.random.Generator, dim: int, workers: int) -> Any:
    kind = random.integers(4)
    if kind == 0:
        return sok.row_wise()
    if kind == 1:
        return sok.table_wise(int(random.integers(workers)))
    if kind == 2 and dim > 1:
        pieces = int(random.integers(1, dim + 1))
        widths = 1 + random.multinomial(dim - pieces, np.full(pieces, 1 / pieces))
        return sok.column_wise(widths.tolist(), random.integers(workers, size=pieces).tolist())
    return sok.data_parallel()


def batch_of(random: np.random.Generator, table: Table, size: int) -> list[list[int]]:
    """Ids of each sample: of a table that is not pooled as many in each, else any number."""
    length = int(random.integers(1, 4))
    lengths = [length if table.combiner is None else int(random.integers(0, 4)) for _ in range(size)]
    return [random.integers(0, table.rows, n).tolist() for n in lengths]


def as_input(table: Table, ids: list[list[int]], form: str) -> Any:
    """[b, n] dense, ragged or sparse; dense ids are those of tables that are not pooled."""
    if table.combiner is None:
        width = len(ids[0]) if ids else 1
        return tf.constant(np.array(ids, np.int64).reshape(len(ids), width))
    ragged = tf.ragged.constant(ids, dtype=tf.int64, ragged_rank=1)
    return ragged.to_sparse() if form == "sparse" else ragged


def look_up(table: Table, matrix: np.ndarray, ids: list[list[int]]) -> np.ndarray:
    rows = [matrix[np.array(sample, int)] for sample in ids]
    if table.combiner is None:
        return np.stack(rows)
    sums = np.stack([row.sum(0) for row in rows])
    return sums / np.maximum([[len(sample)] for sample in ids], 1) if table.combiner == "mean" else sums


def gradient(table: Table, matrix: np.ndarray, ids: list[list[int]], upstream: np.ndarray) -> np.ndarray:
    found = np.zeros_like(matrix)
    for sample, grad in zip(ids, upstream, strict=True):
        scale = 1 / max(len(sample), 1) if table.combiner == "mean" else 1
        for place, key in enumerate(sample):
            found[key] += scale * (grad[place] if table.combiner is None else grad)
    return found


def parts_of(random: np.random.Generator, size: int, workers: int) -> list[slice]:
    """Uneven parts of a batch, some of them maybe empty."""
    cuts = np.sort(random.integers(0, size + 1, workers - 1)).tolist()
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
