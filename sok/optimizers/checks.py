"""Checks of hyperparameters that several rules share."""

from __future__ import annotations

import math
import numbers


def not_negative(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"`{name}` must be a finite number that is not negative. Received: {value!r}.")
    return float(value)


def decay_rate(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be a number in [0, 1). Received: {value!r}.")
    return float(value)
