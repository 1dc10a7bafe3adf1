"""Key dtypes, their extreme values, and keys as the 64-bit words that a table holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

KEY_DTYPES = (np.int64, np.int32, np.uint32, np.uint64)


def extreme_keys(dtype: type) -> np.ndarray:
    """Smallest, largest, and the values where a sign or a carry goes wrong, as far as the dtype has them."""
    info = np.iinfo(dtype)
    wanted = [info.min, info.min + 1, -2, -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2]
    wanted += [info.max - 1, info.max]
    return np.array(list(dict.fromkeys(k for k in wanted if info.min <= k <= info.max)), dtype)


def word(key: int) -> int:
    """The 64-bit word of a key: two's complement, so signed keys are sign-extended."""
    return int(key) % 2**64


def ints(keys: Iterable[int]) -> list[int]:
    """Keys as Python integers, which neither overflow nor change sign."""
    return [int(k) for k in np.asarray(keys).reshape(-1)]
