"""From the segment of each key to row splits, and what makes a batch of keys illegal: `SparseToCsr`, `ValidateCsr`."""

from __future__ import annotations

import numpy as np


def sparse_to_csr(row: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives (row_splits, order): order[j] is the place in the input of output j; stable inside a segment."""
    order = [i for s in range(num_rows) for i in range(len(row)) if row[i] == s]
    counts = [sum(1 for r in row if r == s) for s in range(num_rows)]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), np.array(order, np.int64)


def first_fault(row_splits: np.ndarray, slot_num: int, max_nnz: int, max_feature_num: int) -> tuple[str, int] | None:
    """The first segment with more than max_nnz keys, else the first sample above max_feature_num. 0: no limit."""
    lengths = np.diff(row_splits)
    for segment, length in enumerate(lengths):
        if max_nnz and length > max_nnz:
            return "segment", segment
    for sample in range(len(lengths) // slot_num):
        if max_feature_num and lengths[sample * slot_num : (sample + 1) * slot_num].sum() > max_feature_num:
            return "sample", sample
    return None
