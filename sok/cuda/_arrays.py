"""Arrays on the device as the kernels take them: addresses, with dtype and shape checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sok.cuda import _native
from sok.cuda._native import Array, address

_WIDE = {"int64": "uint64", "uint64": "uint64", "int32": "int64", "uint32": "uint64"}
FLOATS = ("float32", "float16", "bfloat16")


def module() -> Any:
    """The module that makes arrays: cupy, or in the emulator numpy."""
    if _native.is_emulated():
        return np
    try:
        import cupy
    except ImportError as error:
        raise ImportError("sok.cuda needs CuPy: install the cupy-cuda* package for your CUDA version.") from error
    return cupy


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Any:
    return module().empty(shape, dtype)


def to_device(name: str, x: object) -> Any:
    """x as an array of the module, without a copy where it is on the device already.

    Raises TypeError naming the argument for what lies on the host."""
    xp = module()
    if isinstance(x, xp.ndarray):
        return x
    if xp is not np and (isinstance(x, (np.ndarray, list, tuple)) or not hasattr(x, "__dlpack__")):
        if hasattr(x, "__cuda_array_interface__"):
            return xp.asarray(x)
        raise TypeError(f"`{name}` must be an array on the device (CuPy's, or with DLPack). Received: {type(x)}.")
    return xp.from_dlpack(x) if hasattr(x, "__dlpack__") else xp.asarray(x)


def vector(name: str, x: object, dtypes: Sequence[str], n: int | None = None) -> Any:
    """x as a contiguous [n] array of one of the dtypes. Raises TypeError or ValueError naming the argument."""
    return _checked(name, x, dtypes, 1, None if n is None else (n,))


def optional(name: str, x: object, dtypes: Sequence[str], n: int | None = None) -> Any:
    """As `vector`; None stays None."""
    return None if x is None else vector(name, x, dtypes, n)


def matrix(name: str, x: object, dtypes: Sequence[str], shape: tuple[int | None, int | None] = (None, None)) -> Any:
    """The same for [n, dim]."""
    return _checked(name, x, dtypes, 2, shape)


def _checked(name: str, x: Any, dtypes: Sequence[str], ndim: int, shape: Sequence[int | None] | None) -> Any:
    x = to_device(name, x)
    if x.dtype.name not in dtypes:
        raise TypeError(f"`{name}` must be of {' or '.join(dtypes)}. Received: {x.dtype.name}.")
    wanted = shape or (None,) * ndim
    if x.ndim != ndim or any(w is not None and w != s for w, s in zip(wanted, x.shape, strict=True)):
        text = ", ".join("?" if w is None else str(w) for w in wanted)
        raise ValueError(f"`{name}` must have shape [{text}]. Received: {list(x.shape)}.")
    return module().ascontiguousarray(x)


def words(name: str, keys: object, n: int | None = None) -> Any:
    """Keys as 64-bit words: int32 is sign-extended, uint32 zero-extended, 64 bits are as they are."""
    given = vector(name, keys, tuple(_WIDE), n)
    return given.astype(_WIDE[given.dtype.name], copy=False).view(np.uint64)


def ids(name: str, x: object, n: int | None = None) -> Any:
    """Row ids or indices as int64."""
    return vector(name, x, ("int64", "int32"), n).astype(np.int64, copy=False)


def bad(first_bad: Array | None, n: int) -> ctypes.c_void_p:
    """Where the `[n]` uint64 words of `first_bad` lie, in which kernels report; null for None."""
    if first_bad is None:
        return address(None)
    given = to_device("first_bad", first_bad)
    words = vector("first_bad", given, ("uint64",), n)
    if address(words).value != address(given).value:
        raise ValueError("`first_bad` must be contiguous: kernels write into it.")
    return address(words)


def none_bad(n: int = 1) -> Any:
    """Words for kernels to report in (first_bad)."""
    return module().full(n, 2**64 - 1, np.uint64)
