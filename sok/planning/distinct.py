"""How many different keys a batch has, and what share of its ids the most frequent rows are."""

from __future__ import annotations

import functools
import math

import numpy as np

_EXACT = 1024  # first ranks taken one by one: most ids are among these
_STEEPEST = 8.0  # exponent: nearly all ids are one
_BIN = 1.01  # and of the others, bins that grow by so much, each of one probability: within 0.1 % of single ranks


@functools.lru_cache(maxsize=4096)
def expected_distinct(num_ids: float, rows: int, skew: float) -> float:
    """How many different keys `num_ids` ids are expected to have, drawn by a power law over `rows` rows.

    The law is that of Merlin's synthetic models: the k-th most frequent row has the probability that
    `x ** -skew` has between k and k + 1. 0: all rows alike.

    Args:
        num_ids: ids drawn, repeats among them; at least 0.
        rows: rows to draw from, at least 1.
        skew: the exponent, at least 0. Click logs have about 1.

    Example:
        >>> expected_distinct(100, 100, skew=0.0)
        63.39...
        >>> round(expected_distinct(65536, 1_000_000, skew=1.05))
        22627
    """
    if num_ids <= 0:
        return 0.0
    counts, chances = _bins(rows, skew)
    with np.errstate(divide="ignore"):
        seen = -np.expm1(num_ids * np.log1p(-chances))
    return float(min(counts @ seen, num_ids))


def skew_of(num_ids: float, distinct: float, rows: int) -> float:
    """The exponent by which `num_ids` ids over `rows` rows are expected to have `distinct` different keys.

    0 where they have more than ids that are all alike; 8 where they have fewer than any.

    Example:
        >>> round(skew_of(65536, expected_distinct(65536, 1_000_000, skew=1.05), 1_000_000), 3)
        1.05
    """
    low, high = 0.0, _STEEPEST
    if num_ids <= 0 or distinct >= expected_distinct(num_ids, rows, low):
        return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_distinct(num_ids, rows, middle) > distinct else (low, middle)
    return (low + high) / 2


def draw(random: np.random.Generator, rows: int, skew: float, number: int) -> np.ndarray:
    """Ids of the law, [number] int64 in [0, rows): 0 is the most frequent one.

    Example:
        >>> draw(np.random.default_rng(0), rows=1000, skew=1.05, number=5).tolist()
        [60, 4, 0, 0, 225]
    """
    if skew == 0:
        return random.integers(rows, size=number)
    g, u = 1.0 - skew, random.random(number)
    x = (rows + 1.0) ** u if g == 0 else (u * ((rows + 1.0) ** g - 1.0) + 1.0) ** (1.0 / g)
    return np.clip(np.floor(x).astype(np.int64) - 1, 0, rows - 1)


@functools.lru_cache(maxsize=4096)
def _bins(rows: int, skew: float) -> tuple[np.ndarray, np.ndarray]:
    """How many rows of which probability."""
    if skew == 0:
        return np.array([float(rows)]), np.array([1.0 / rows])
    edges = [float(k) for k in range(1, min(rows, _EXACT) + 2)]
    while edges[-1] < rows + 1:
        edges.append(min(rows + 1.0, math.ceil(edges[-1] * _BIN)))
    ends = np.array(edges)
    counts = np.diff(ends)
    below = np.log(ends) if skew == 1 else (ends ** (1 - skew) - 1) / (1 - skew)
    return counts, np.diff(below) / below[-1] / counts
