"""What a table is made with: arguments checked, its name and its seed worked out."""

from __future__ import annotations

import hashlib
from typing import Any

import tensorflow as tf

_WAYS_HOME = ("auto", "rows", "sums")
_EXCHANGE_DTYPES = ("float32", "float16", "bfloat16")


def whole_number(argument: str, value: Any, top: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 1 <= value <= top:
        raise ValueError(f"`{argument}` must be a whole number in [1, {top}]. Received: {value!r}.")
    return int(value)


def checked_way_home(way_home: Any) -> str:
    if way_home not in _WAYS_HOME:
        raise ValueError(f"`way_home` must be one of {', '.join(map(repr, _WAYS_HOME))}. Received: {way_home!r}.")
    return way_home


def checked_exchange_dtype(dtype: Any) -> str:
    try:
        name = tf.as_dtype(dtype).name
    except TypeError:
        name = None
    if name not in _EXCHANGE_DTYPES:
        accepted = ", ".join(map(repr, _EXCHANGE_DTYPES))
        raise ValueError(f"`exchange_dtype` must be one of {accepted}. Received: {dtype!r}.")
    return name


def derived_seed(*parts: Any) -> int:
    """A stable signed 64-bit number made of `parts`; Python's own hash changes from process to process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
