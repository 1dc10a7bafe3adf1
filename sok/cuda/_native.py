"""Loads libsok_cuda.so and calls it: the only file of sok.cuda that knows ctypes' side of the C interface."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import cupy

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
    lib.sok_cuda_mark_destroy.restype = None
    return lib


def is_emulated() -> bool:
    """Whether the library is the emulator of the tests, where arrays are NumPy's."""
    return bool(library().sok_cuda_is_emulated())


def check(status: int) -> None:
    """Raises what the status of a call stands for."""
    if status != 0:
        raise _ERRORS.get(status, RuntimeError)(library().sok_cuda_last_error().decode())


class _Mark:
    """A place in the work of a context."""

    def __init__(self, context: ctypes.c_void_p) -> None:
        self._lib, self._pointer = library(), ctypes.c_void_p()
        check(self._lib.sok_cuda_mark_create(context, ctypes.byref(self._pointer)))

    def has_passed(self) -> bool:
        passed = ctypes.c_int()
        check(self._lib.sok_cuda_mark_has_passed(self._pointer, ctypes.byref(passed)))
        return bool(passed.value)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._lib.sok_cuda_mark_destroy(self._pointer)


class Context:
    """A stream of a device, with scratch, of one thread. Given back with the thread.

    It keeps arrays of other libraries until the stream is done with them: their memory may be anybody's after that."""

    def __init__(self, device: int, stream: int, cupys: object) -> None:
        self._lib, self.pointer = library(), ctypes.c_void_p()
        self.device, self.stream = device, stream
        self._cupys = cupys  # its object of the stream lives as long: scratch is freed on it
        self._borrowed: list[Any] = []  # since the last call
        self._streams: set[int] = set()  # on which others work with these
        self._held: deque[tuple[_Mark, list[Any]]] = deque()
        check(self._lib.sok_cuda_context_create(ctypes.c_void_p(stream), ctypes.byref(self.pointer)))

    def borrow(self, owner: object, stream: int | None) -> None:
        """Keeps the owner until the next call is done. Work from now on waits for what `stream` has been given so far,
        and what it is given after that call waits for it; None: neither."""
        if stream is not None and (stream or 1) != (self.stream or 1):
            check(self._lib.sok_cuda_wait_for(self.pointer, ctypes.c_void_p(stream)))
            self._streams.add(stream)
        self._borrowed.append(owner)

    def end_call(self) -> None:
        """After a call has put its work on the stream."""
        while self._streams:
            check(self._lib.sok_cuda_let_wait(self.pointer, ctypes.c_void_p(self._streams.pop())))
        if self._borrowed:
            self._held.append((_Mark(self.pointer), self._borrowed))
            self._borrowed = []
        while self._held and self._held[0][0].has_passed():
            self._held.popleft()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process CUDA may have gone before, and what this module imports.
        if not is_finalizing():
            if self._held or self._borrowed:
                self._lib.sok_cuda_synchronize(self.pointer)
            self._lib.sok_cuda_context_destroy(self.pointer)


class _Contexts(threading.local):
    """A context for each stream and device that this thread has used: scratch is not to be shared."""

    def __init__(self) -> None:
        self.of_stream: dict[tuple[Any, ...], Context] = {}


_contexts = _Contexts()


def current_device() -> int:
    """CuPy's."""
    if is_emulated():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDevice())


def context() -> Context:
    """That of CuPy's current device and stream."""
    device, pointer, stream = current_device(), 0, None
    if not is_emulated():
        import cupy

        stream = cupy.cuda.get_current_stream()
        pointer = stream.ptr
    known, lib = _contexts.of_stream, library()
    if (lib, device, pointer) not in known:
        known[lib, device, pointer] = Context(device, pointer, stream)
    return known[lib, device, pointer]


_C_TYPES: dict[type, Any] = {int: ctypes.c_int64, bool: ctypes.c_int, float: ctypes.c_float, str: str.encode}


def call(name: str, *args: Any) -> None:
    """Calls sok_cuda_<name> in the current context, with Python's values, arrays, or what is of ctypes already."""
    here = context()
    try:
        check(getattr(library(), "sok_cuda_" + name)(here.pointer, *map(_as_argument, args)))
    finally:
        here.end_call()
    if is_emulated():  # NumPy knows no streams
        check(library().sok_cuda_synchronize(here.pointer))


def _as_argument(arg: Any) -> Any:
    if hasattr(arg, "dtype"):
        return address(arg)
    convert = _C_TYPES.get(type(arg))
    return arg if convert is None else convert(arg)


def address(array: cupy.ndarray | np.ndarray | None) -> ctypes.c_void_p:
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
