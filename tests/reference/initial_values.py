"""What a fresh row holds (docs/design/initial_values.md): a pure function of (seed, key)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from tests.reference.keys import word
from tests.reference.philox import MASK, philox4x32

PURPOSE = 0x736F6B31  # 'sok1'
# These three agree bit for bit. The others go through log, cos or erf, which libraries round differently.
EXACT = ("constant", "uniform", "bank")
# Of those others, in standard deviations. A 24-bit uniform has steps of 6e-8; the slope of the inverse normal at two
# standard deviations (18) and a single-precision erfinv (2e-6) widen them.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Initializer:
    kind: str = "uniform"
    a: float = -0.05
    b: float = 0.05
    bank: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))


def row_words(seed: int, key: int, dim: int) -> list[int]:
    """One 32-bit word for each element of a row, rounded up to whole blocks of four."""
    low_high = lambda value: (value & MASK, value >> 32)  # noqa: E731
    blocks = [philox4x32((*low_high(word(key)), b, PURPOSE), low_high(word(seed))) for b in range((dim + 3) // 4)]
    return [w for block in blocks for w in block]


def initial_row(init: Initializer, seed: int, key: int, dim: int) -> np.ndarray:
    """The fresh row [dim] of a key, float32."""
    words = row_words(seed, key, dim)
    a, b = np.float32(init.a), np.float32(init.b)
    if init.kind == "constant":
        return np.full(dim, a)
    if init.kind == "uniform":
        return np.array([a + np.float32((w >> 8) * 2.0**-24) * (b - a) for w in words[:dim]], np.float32)
    if init.kind == "bank":
        return np.array([init.bank[(w * len(init.bank)) >> 32, j] for j, w in enumerate(words[:dim])], np.float32)
    if init.kind == "normal":
        z: list[float] = []
        for first, second in zip(words[0::2], words[1::2], strict=True):
            radius = math.sqrt(-2.0 * math.log(((first >> 8) + 1) * 2.0**-24))
            angle = 2.0 * math.pi * (second >> 8) * 2.0**-24
            z += [radius * math.cos(angle), radius * math.sin(angle)]
        return (a + b * np.array(z[:dim])).astype(np.float32)
    if init.kind == "truncated_normal":
        low, high = NormalDist().cdf(-2.0), NormalDist().cdf(2.0)
        uniforms = [((w >> 8) + 0.5) * 2.0**-24 for w in words[:dim]]
        z = [NormalDist().inv_cdf(low + u * (high - low)) for u in uniforms]
        return (a + b * np.array(z)).astype(np.float32)
    raise ValueError(f"unknown initializer {init.kind!r}")


def initial_rows(init: Initializer, seed: int, keys: np.ndarray, dim: int) -> np.ndarray:
    """[N, dim]"""
    rows = [initial_row(init, seed, int(key), dim) for key in keys]
    return np.array(rows, np.float32).reshape(len(rows), dim)
