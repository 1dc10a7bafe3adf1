"""Messages whose rows travel in 16 bit: `ExchangeNarrow` and `ExchangeWiden`."""

from __future__ import annotations

import numpy as np

from tests.reference.exchange import ANSWER_HEADER

TYPES = ("float16", "bfloat16")


def halves(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as 16 bits each, rounded to the nearest, ties to even; what is too large is infinite."""
    values = np.asarray(values, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    # The upper half of a float32: what the lower one adds decides whether the next is nearer.
    words = values.view(np.uint32).astype(np.int64)
    upper, lower = words >> 16, words & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    return np.where(np.isnan(values), upper | 0x40, upper + up).astype(np.uint16)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What is left of float32 values after their journey: float32."""
    if dtype == "float32":
        return np.asarray(values, np.float32)
    bits = halves(values, dtype)
    return bits.view(np.float16).astype(np.float32) if dtype == "float16" else (bits.astype(np.uint32) << 16).view("f4")


def narrow(message: np.ndarray, dtype: str) -> np.ndarray:
    """One message as words: the header, and then two values to a word, filled up with zero bits."""
    values = halves(message[ANSWER_HEADER:], dtype)
    values = np.concatenate([values, np.zeros(len(values) % 2, np.uint16)])
    return np.concatenate([message[:ANSWER_HEADER], values.view(np.float32)])
