"""Arrays on the device as the kernels take them: addresses, with dtype and shape checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sok.cuda import _borrowed, _dlpack, _native
from sok.cuda._borrowed import Borrowed, HasDLPack, HasInterface
from sok.cuda._native import address

if TYPE_CHECKING:
    import cupy


Array: TypeAlias = "cupy.ndarray | np.ndarray | HasInterface | HasDLPack"  # on the device; NumPy's in the emulator

_WIDE = {"int64": "int64", "uint64": "uint64", "int32": "int64", "uint32": "uint64"}
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


class _Plain:
    """What another library has, for the module to make an array of: nothing is left to be waited for."""

    def __init__(self, borrowed: Borrowed) -> None:
        self._owner = borrowed.owner
        said = {"shape": borrowed.shape, "typestr": borrowed.typestr, "data": (borrowed.pointer, False), "version": 3}
        self.__array_interface__ = self.__cuda_array_interface__ = said


def _on_device(name: str, x: Any, *, written: bool = False) -> tuple[Any, str]:
    """x as an array of the module, without a copy, and its dtype: bfloat16 of other libraries is an array of words."""
    xp = module()
    if isinstance(x, xp.ndarray):
        if written and not getattr(x.flags, "writeable", True):
            raise _borrowed.read_only(name, x)
        if xp is not np and x.data.device_id != _native.current_device():
            raise _borrowed.on_another_device(name, x.data.device_id, _native.current_device())
        return x, x.dtype.name
    here = _native.context()
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        found = _dlpack.take(name, x, here.device, here.stream)
    elif hasattr(x, "__cuda_array_interface__"):
        found = _borrowed.by_interface(name, x)
    else:
        raise _borrowed.on_the_host(name, x)
    _borrowed.check(name, found, here.device)
    if written and found.read_only:
        raise _borrowed.read_only(name, x)
    if found.nbytes == 0:
        return empty(found.shape, found.dtype), found.dtype_name
    here.borrow(found.owner, found.stream)
    return xp.asarray(_Plain(found)), found.dtype_name


def vector(name: str, x: object, dtypes: Sequence[str], n: int | None = None) -> Any:
    """x as a contiguous [n] array of one of the dtypes. Raises TypeError or ValueError naming the argument."""
    return _checked(name, x, dtypes, 1, None if n is None else (n,))


def optional(name: str, x: object, dtypes: Sequence[str], n: int | None = None) -> Any:
    """As `vector`; None stays None."""
    return None if x is None else vector(name, x, dtypes, n)


def matrix(name: str, x: object, dtypes: Sequence[str], shape: tuple[int | None, int | None] = (None, None)) -> Any:
    """The same for [n, dim]."""
    return _checked(name, x, dtypes, 2, shape)


def _checked(
    name: str, x: Any, dtypes: Sequence[str], ndim: int, shape: Sequence[int | None] | None, *, written: bool = False
) -> Any:
    x, dtype = _on_device(name, x, written=written)
    if dtype not in dtypes:
        raise TypeError(f"`{name}` must be of {' or '.join(dtypes)}. Received: {dtype}.")
    wanted = shape or (None,) * ndim
    if x.ndim != ndim or any(w is not None and w != s for w, s in zip(wanted, x.shape, strict=True)):
        text = ", ".join("?" if w is None else str(w) for w in wanted)
        raise ValueError(f"`{name}` must have shape [{text}]. Received: {list(x.shape)}.")
    if written and not x.flags.c_contiguous:
        raise ValueError(f"`{name}` must be contiguous: kernels write into it. Received: strides {list(x.strides)}.")
    return module().ascontiguousarray(x)


def words(name: str, keys: object, n: int | None = None) -> Any:
    """Keys as 64-bit words: int32 is sign-extended, uint32 zero-extended, 64 bits are as they are."""
    return words_and_dtype(name, keys, n)[0]


def words_and_dtype(name: str, keys: object, n: int | None = None) -> tuple[Any, np.dtype[Any]]:
    """The same, and what they were."""
    given = vector(name, keys, tuple(_WIDE), n)
    return given.astype(_WIDE[given.dtype.name], copy=False).view(np.uint64), given.dtype


def keys_of(words: cupy.ndarray | np.ndarray, dtype: np.dtype[Any]) -> Any:
    """Words as keys of the dtype that they were of."""
    return words.view(dtype if dtype.itemsize == 8 else np.int64).astype(dtype, copy=False)


def ids(name: str, x: object, n: int | None = None) -> Any:
    """Row ids or indices as int64."""
    return vector(name, x, ("int64", "int32"), n).astype(np.int64, copy=False)


def written(name: str, x: object, dtype: str, shape: Sequence[int | None]) -> Any:
    """x of this dtype and shape, where kernels write into it. Raises TypeError or ValueError naming the argument."""
    return _checked(name, x, (dtype,), len(shape), shape, written=True)


def bad(first_bad: Array | None, n: int) -> ctypes.c_void_p:
    """Where the `[n]` uint64 words of `first_bad` lie, in which kernels report; null for None."""
    return address(None if first_bad is None else written("first_bad", first_bad, "uint64", (n,)))


def none_bad(n: int = 1) -> Any:
    """Words for kernels to report in (first_bad)."""
    return module().full(n, 2**64 - 1, np.uint64)
