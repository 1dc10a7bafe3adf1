"""Grouped sum: `UnsortedSegmentSum`."""

from __future__ import annotations

import numpy as np


def unsorted_segment_sum(data: np.ndarray, segment_ids: np.ndarray, num_segments: int) -> np.ndarray:
    """Row s is the sum of the rows of data whose id is s; negative ids are dropped. Summed in float64, rounded once."""
    ids = np.asarray(segment_ids)
    inner = data.shape[ids.ndim :]
    rows = np.asarray(data, np.float64).reshape(ids.size, *inner)
    sums = np.zeros((num_segments, *inner), np.float64)
    for row, segment in zip(rows, ids.reshape(-1), strict=True):
        if segment >= num_segments:
            raise ValueError(f"segment id {segment} is not below {num_segments}")
        if segment >= 0:
            sums[segment] += row
    return sums.astype(data.dtype)


def unsorted_segment_sum_grad(grad: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """Each row gets the gradient of its segment; dropped rows get zeros."""
    ids = np.asarray(segment_ids)
    rows = [grad[s] if s >= 0 else np.zeros(grad.shape[1:], grad.dtype) for s in ids.reshape(-1)]
    return np.array(rows, grad.dtype).reshape(*ids.shape, *grad.shape[1:])
