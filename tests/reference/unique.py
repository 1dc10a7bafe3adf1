"""Distinct values in order of first appearance: `Unique`."""

from __future__ import annotations

import numpy as np


def unique(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives (distinct values, place of each input among them, how often each occurs)."""
    place_of: dict[int, int] = {}
    counts: list[int] = []
    inverse = []
    for value in x:
        place = place_of.setdefault(int(value), len(place_of))
        if place == len(counts):
            counts.append(0)
        counts[place] += 1
        inverse.append(place)
    return np.array(list(place_of), x.dtype), np.array(inverse, np.int64), np.array(counts, np.int64)
