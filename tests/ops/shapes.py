"""Named inputs that every operation on keys meets: what breaks code is seldom in the middle."""

from __future__ import annotations

import numpy as np

SHAPES = ("empty", "one", "all_equal", "all_distinct", "skewed", "extreme", "split_over_threads")


SEGMENT_SIZES = {  # ids, segments, rows, dim
    "no_segments": (0, 0, 3, 2),
    "no_ids": (0, 4, 0, 2),
    "one": (1, 1, 1, 1),
    "all_in_one_segment": (40, 1, 5, 3),
    "mixed": (60, 25, 9, 7),
    "split_over_threads": (5_000, 2_000, 300, 16),
}


def make_segments(
    rng: np.random.Generator, n: int, segments: int, num_rows: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows [num_rows, dim], which of them n ids name, and the splits of segments of all lengths, some empty."""
    rows = rng.normal(size=(num_rows, dim)).astype(np.float32)
    ids = rng.integers(0, num_rows, n) if num_rows else np.zeros(0, np.int64)
    splits = np.concatenate([[0], np.sort(rng.integers(0, n + 1, segments - 1)), [n]]) if segments else np.zeros(1)
    return rows, ids, splits.astype(np.int64)


def report(status: int, detail: int) -> np.ndarray:
    """What stands in place of row splits where an input is bad (docs/design/native_ops.md)."""
    return np.array([-(2**63) + status, detail])


def make_keys(shape: str, dtype: type, rng: np.random.Generator) -> np.ndarray:
    """Keys [N] of the named shape."""
    from tests.reference.keys import extreme_keys

    if shape == "empty":
        return np.zeros(0, dtype)
    if shape == "one":
        return np.array([7], dtype)
    if shape == "all_equal":
        return np.full(300, 5, dtype)
    if shape == "all_distinct":
        return rng.permutation(500).astype(dtype)
    if shape == "skewed":
        return (rng.zipf(1.3, 400) % 1000).astype(dtype)
    if shape == "extreme":
        return rng.permutation(np.tile(extreme_keys(dtype), 3))
    if shape == "split_over_threads":  # several chunks and partitions for each of four threads
        return rng.integers(0, 20_000, 60_000).astype(dtype)
    raise ValueError(shape)
