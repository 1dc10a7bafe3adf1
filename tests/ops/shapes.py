"""Named inputs that every operation on keys meets: what breaks code is seldom in the middle."""

from __future__ import annotations

import numpy as np

SHAPES = ("empty", "one", "all_equal", "all_distinct", "skewed", "extreme", "split_over_threads")


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
