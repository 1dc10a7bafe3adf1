"""Stand-ins for other libraries: arrays that speak one protocol, and streams on which they work."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from sok.cuda import _dlpack, _native

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_Deleter, _Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Interface:
    """As an array of Numba's: what `changed` says is said instead."""

    def __init__(self, x: Any, **changed: Any) -> None:
        self._x = x
        said = {"shape": x.shape, "typestr": x.dtype.str, "data": (_native.address(x).value, False), "version": 3}
        self.__cuda_array_interface__ = {**said, "strides": None, "stream": None, **changed}


class Tensor:
    """As a tensor of PyTorch's, by a capsule with a version or without.

    Keyword arguments are said instead of the truth: of the tensor `shape`, `strides` (in elements), `data` and `dtype`;
    `device` of both, `tensor_device` of the tensor alone."""

    _alive: dict[int, tuple[Any, Tensor]] = {}  # of all of them: each lives until nobody has what it exported

    def __init__(self, x: Any, *, version: tuple[int, int] | None = (1, 1), flags: int = 0, **said: Any) -> None:
        self._x, self._version, self._flags = x, version, flags
        self._said = {"shape": x.shape, "strides": None, "data": _native.address(x).value, "device": (2, 0), **said}
        self._deleter, self._destructor = _Deleter(self._delete), _Destructor(self._destroy)
        self.deleted = 0
        self.streams: list[int] = []  # that a consumer named

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._said["device"]

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> Any:
        self.streams.append(stream)
        with_version = self._version is not None and max_version is not None
        managed = (_dlpack.ManagedVersioned if with_version else _dlpack.Managed)()
        if with_version:
            (managed.major, managed.minor), managed.flags = self._version, self._flags
        shape, strides = self._said["shape"], self._said["strides"]
        tensor, words = managed.tensor, ctypes.c_int64 * len(shape)
        tensor.ndim, tensor.shape = len(shape), words(*shape)
        if strides is not None:
            tensor.strides = words(*strides)
        tensor.device = self._said.get("tensor_device", self._said["device"])
        dtype = self._x.dtype
        tensor.dtype = self._said.get("dtype", (_CODES[dtype.kind], dtype.itemsize * 8, 1))
        tensor.byte_offset = 16  # that there is one must not matter
        tensor.data = None if self._said["data"] is None else self._said["data"] - 16
        tensor.byte_offset = 0 if self._said["data"] is None else 16
        managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        self._alive[ctypes.addressof(managed)] = managed, self
        name = b"dltensor_versioned" if with_version else b"dltensor"
        return _new(ctypes.addressof(managed), name, ctypes.cast(self._destructor, ctypes.c_void_p))

    def _delete(self, pointer: int) -> None:
        self.deleted += 1
        del self._alive[pointer]

    def _destroy(self, capsule: int) -> None:  # as DLPack asks of who makes one: what nobody took is deleted with it
        if any(_is_valid(capsule, name) for name in (b"dltensor", b"dltensor_versioned")):
            self._delete(next(pointer for pointer, (_, tensor) in self._alive.items() if tensor is self))


class Old(Tensor):
    """From before there were versions."""

    def __dlpack__(self, stream: int) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


class Stream:
    """A stream of the emulator's, on which Python works."""

    _gates: list[threading.Event] = []
    _work: list[Any] = []  # for ever: nobody knows when a stream has returned from what it did last

    def __init__(self) -> None:
        self._lib, self.handle = _native.library(), ctypes.c_void_p()
        self._emulated("_Z25cudaStreamCreateWithFlagsPP11CUstream_stj", ctypes.byref(self.handle), 1)

    @classmethod
    def of(cls, handle: int | None) -> Stream:
        """One that is there already: None, 1: the legacy default; 2: this thread's."""
        stream = cls.__new__(cls)
        stream._lib, stream.handle = _native.library(), ctypes.c_void_p(handle)
        return stream

    def do(self, work: Callable[[], Any]) -> None:
        self._work.append(_Deleter(lambda _: work()))
        self._emulated("_Z18cudaLaunchHostFuncP11CUstream_stPFvPvES1_", self.handle, self._work[-1], None)

    def hold(self) -> threading.Event:
        """Work from here on waits until the event is set."""
        self._gates.append(gate := threading.Event())
        self.do(lambda: gate.wait(60))
        return gate

    @classmethod
    def let_all_go(cls) -> None:
        """For tests that have failed."""
        while cls._gates:
            cls._gates.pop().set()

    def synchronize(self) -> None:
        self._emulated("_Z21cudaStreamSynchronizeP11CUstream_st", self.handle)

    def _emulated(self, name: str, *args: Any) -> None:
        assert getattr(self._lib, name)(*args) == 0


def memory_of(device: int, n: int) -> np.ndarray:
    """`[n]` int64 on a device of the emulator's, which nobody but its kernels can read."""
    lib, pointer, before = _native.library(), ctypes.c_void_p(), ctypes.c_int()
    lib._Z13cudaGetDevicePi(ctypes.byref(before))
    lib._Z13cudaSetDevicei(device)
    lib._Z10cudaMallocPPvm(ctypes.byref(pointer), ctypes.c_size_t(8 * n))
    lib._Z13cudaSetDevicei(before.value)
    assert pointer.value is not None
    return np.frombuffer((ctypes.c_int64 * n).from_address(pointer.value), np.int64)


def pinned(n: int) -> np.ndarray:
    """`[n]` int64 of the host that the emulator's devices can reach."""
    pointer = ctypes.c_void_p()
    _native.library()._Z13cudaHostAllocPPvmj(ctypes.byref(pointer), ctypes.c_size_t(8 * n), 0)
    assert pointer.value is not None
    return np.frombuffer((ctypes.c_int64 * n).from_address(pointer.value), np.int64)
