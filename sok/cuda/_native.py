"""Loads libsok_cuda.so and calls it: the only file of sok.cuda that knows ctypes' side of the C interface."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import cupy

Array: TypeAlias = "cupy.ndarray | np.ndarray"  # on the device; NumPy's in the emulator. Or what DLPack makes one of.

LIBRARY_VARIABLE = "SOK_CUDA_LIBRARY"
_DEFAULT = Path(__file__).resolve().parent.parent / "_native" / "libsok_cuda.so"


class CudaError(RuntimeError):
    """A call to CUDA failed: no device, or an earlier kernel went wrong."""


class OutOfMemoryError(MemoryError):
    """The device, or the host, gave no memory."""


class TableFullError(RuntimeError):
    """A table has no room for the new keys of a call; nothing was changed."""


_ERRORS = {
    1: ValueError,
    2: TableFullError,
    3: OutOfMemoryError,
    4: RuntimeError,
    5: CudaError,
    6: RuntimeError,
}


def library() -> ctypes.CDLL:
    """The native library. Raises ImportError, with what to do, where there is none."""
    return _load(os.environ.get(LIBRARY_VARIABLE) or str(_DEFAULT))


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"sok.cuda needs the native library {path}, which did not load: {error}. Build it where there is nvcc with "
            f"SOK_CUDA=ON make native, or set {LIBRARY_VARIABLE} to where it is."
        ) from error
    lib.sok_cuda_last_error.restype = ctypes.c_char_p
    lib.sok_cuda_context_destroy.restype = None
    lib.sok_cuda_decay_destroy.restype = None
    return lib


def is_emulated() -> bool:
    """Whether the library is the emulator of the tests, where arrays are NumPy's."""
    return bool(library().sok_cuda_is_emulated())


def check(status: int) -> None:
    """Raises what the status of a call stands for."""
    if status != 0:
        raise _ERRORS.get(status, RuntimeError)(library().sok_cuda_last_error().decode())


class _Context:
    """Scratch on a stream, of one thread. Given back with the thread."""

    def __init__(self, pointer: int, stream: Any) -> None:
        self._lib, self.pointer = library(), ctypes.c_void_p()
        self._stream = stream  # lives as long: scratch is freed on it
        check(self._lib.sok_cuda_context_create(ctypes.c_void_p(pointer), ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        # At the end of the process CUDA may have gone before.
        if not sys.is_finalizing():
            self._lib.sok_cuda_context_destroy(self.pointer)


class _Contexts(threading.local):
    """A context for each stream and device that this thread has used: scratch is not to be shared."""

    def __init__(self) -> None:
        self.of_stream: dict[tuple[Any, ...], _Context] = {}


_contexts = _Contexts()


def context() -> ctypes.c_void_p:
    """That of CuPy's current device and stream."""
    device, pointer, stream = 0, 0, None
    if not is_emulated():
        import cupy

        device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()
        pointer = stream.ptr
    known, lib = _contexts.of_stream, library()
    if (lib, device, pointer) not in known:
        known[lib, device, pointer] = _Context(pointer, stream)
    return known[lib, device, pointer].pointer


_C_TYPES: dict[type, Any] = {int: ctypes.c_int64, bool: ctypes.c_int, float: ctypes.c_float, str: str.encode}


def call(name: str, *args: Any) -> None:
    """Calls sok_cuda_<name> in the current context, with Python's values, arrays, or what is of ctypes already."""
    check(getattr(library(), "sok_cuda_" + name)(context(), *map(_as_argument, args)))
    if is_emulated():  # NumPy knows no streams
        check(library().sok_cuda_synchronize(context()))


def _as_argument(arg: Any) -> Any:
    if hasattr(arg, "dtype"):
        return address(arg)
    convert = _C_TYPES.get(type(arg))
    return arg if convert is None else convert(arg)


def address(array: Array | None) -> ctypes.c_void_p:
    """Where an array lies; null for None."""
    if array is None:
        return ctypes.c_void_p(None)
    return ctypes.c_void_p(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64


class Rows(ctypes.Structure):
    """SokCudaRows."""

    _fields_ = [("slabs", _ADDRESS), ("matrix", _ADDRESS), ("shift", _INT), ("mask", _INT), ("stride", _INT)]


class Segments(ctypes.Structure):
    """SokCudaSegments."""

    _fields_ = [("row_splits", _ADDRESS), ("hotness", _INT), ("segments", _INT), ("n", _INT)]


class Feature(ctypes.Structure):
    """SokCudaFeature."""

    _fields_ = [
        ("rows", Rows),
        ("num_rows", _INT),
        ("dim", _INT),
        ("index", _ADDRESS),
        ("segments", Segments),
        ("weights", _ADDRESS),
        ("combiner", ctypes.c_char_p),
        ("output", _ADDRESS),
        ("output_stride", _INT),
    ]


class Addends(ctypes.Structure):
    """SokCudaAddends."""

    _fields_ = [
        ("table", _INT),
        ("row_ids", _ADDRESS),
        ("values", _ADDRESS),
        ("values_stride", _INT),
        ("segments", Segments),
        ("weights", _ADDRESS),
        ("combiner", ctypes.c_char_p),
    ]


class TableSums(ctypes.Structure):
    """SokCudaRowSums."""

    _fields_ = [("num_rows", _INT), ("dim", _INT), ("row_ids", _ADDRESS), ("sums", _ADDRESS), ("num_sums", _ADDRESS)]


class Asked(ctypes.Structure):
    """SokCudaAsked."""

    _fields_ = [("table", _ADDRESS), ("keys", _ADDRESS), ("n", _INT), ("rows", _ADDRESS), ("row_ids", _ADDRESS)]


class TableGradients(ctypes.Structure):
    """SokCudaGradients."""

    _fields_ = [("table", _ADDRESS), ("row_ids", _ADDRESS), ("grads", _ADDRESS), ("n", _INT), ("num_grads", _ADDRESS)]


class Update(ctypes.Structure):
    """SokCudaUpdate."""

    _fields_ = [("rows", Rows), ("num_rows", _INT), ("slot_offset", _INT), ("decay", _ADDRESS), ("stamps", _ADDRESS)]
