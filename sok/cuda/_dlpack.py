"""Arrays of other libraries as DLPack hands them over: capsules, with and without a version, read by ctypes alone."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from sok.cuda._borrowed import Borrowed, HasDLPack, on_another_device, on_the_host

_MOST_VERSION = (1, 1)  # that this file has read; a later minor one adds types and flags alone
_CPU, _CUDA, _CUDA_HOST, _MANAGED = 1, 2, 3, 13
_READ_ONLY = 1  # of the flags
_BFLOAT16 = 4
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}  # by DLPack's code, NumPy's


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


# Name of a capsule: the same when its tensor has been taken, and what it has. The names outlive every capsule.
_CAPSULES: dict[bytes, tuple[bytes, type[Any]]] = {
    b"dltensor_versioned": (b"used_dltensor_versioned", ManagedVersioned),
    b"dltensor": (b"used_dltensor", Managed),
}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # without Python's lock, as from C++


class _Owner:
    """Memory that is given back, once, when nobody has this any more."""

    def __init__(self, pointer: int, deleter: int | None) -> None:
        self._pointer, self._deleter = pointer, deleter

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process whoever gave it may have gone before, and what this module imports.
        if self._deleter and not is_finalizing():
            _Deleter(self._deleter)(self._pointer)


def take(name: str, x: HasDLPack, device: int, stream: int) -> Borrowed:
    """What x exports, for work on the stream of the device, which its library makes wait for what it has done.

    Raises TypeError or ValueError naming the argument; then x keeps what it has."""
    kind, number = map(int, x.__dlpack_device__())
    if kind in (_CPU, _CUDA_HOST):
        raise on_the_host(name, x)
    if kind not in (_CUDA, _MANAGED):
        raise TypeError(
            f"`{name}` must lie in the memory of a CUDA device. Received: {type(x)} on one of DLPack's kind {kind}."
        )
    if kind == _CUDA and number != device:
        raise on_another_device(name, number, device)
    capsule = _exported(name, x, stream or 1)  # 0 is nobody's; 1 is the legacy default stream
    unused = next((known for known in _CAPSULES if _is_valid(capsule, known)), None)
    if unused is None:
        raise TypeError(
            f"`{name}`: `__dlpack__` of {type(x)} must give a capsule that nobody has used. Received: {capsule!r}."
        )
    used, structure = _CAPSULES[unused]
    pointer = _get_pointer(capsule, unused)
    managed = ctypes.cast(pointer, ctypes.POINTER(structure)).contents
    if structure is ManagedVersioned and managed.major > _MOST_VERSION[0]:
        raise TypeError(
            f"`{name}` must come by DLPack {_MOST_VERSION[0]}. Received: version {managed.major}.{managed.minor}, "
            f"though `max_version` was {_MOST_VERSION}."
        )
    tensor = managed.tensor
    if (tensor.device.kind, tensor.device.number) != (kind, number):
        raise ValueError(
            f"`{name}`: {type(x)} says by `__dlpack_device__` that it is on {(kind, number)}, and by its tensor on "
            f"{(tensor.device.kind, tensor.device.number)}."
        )
    borrowed = _read(name, tensor, bool(getattr(managed, "flags", 0) & _READ_ONLY))
    _set_name(capsule, used)
    return borrowed._replace(owner=_Owner(pointer, managed.deleter))


def _exported(name: str, x: Any, stream: int) -> Any:
    try:
        try:
            return x.__dlpack__(stream=stream, max_version=_MOST_VERSION)
        except TypeError:  # from before there were versions
            return x.__dlpack__(stream=stream)
    except Exception as error:
        raise TypeError(f"`{name}`: {type(x)} does not give itself by DLPack: {error}") from error


def _read(name: str, tensor: Tensor, read_only: bool) -> Borrowed:
    kind, width = tensor.dtype.code, tensor.dtype.bits // 8
    is_bfloat16 = (kind, tensor.dtype.bits) == (_BFLOAT16, 16)
    typestr = "<u2" if is_bfloat16 else f"<{_KINDS.get(kind, '?')}{width}"
    try:
        is_known = tensor.dtype.lanes == 1 and tensor.dtype.bits % 8 == 0 and np.dtype(typestr).itemsize == width
    except TypeError:
        is_known = False
    if not is_known:
        raise TypeError(
            f"`{name}` must be of a type of NumPy's, or bfloat16. Received: DLPack's code {kind} with "
            f"{tensor.dtype.bits} bits and {tensor.dtype.lanes} lanes."
        )
    if tensor.ndim < 0 or (tensor.ndim > 0 and not tensor.shape):
        raise ValueError(f"`{name}` must have a shape. Received: {tensor.ndim} dimensions without one.")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(width * s for s in tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
    return Borrowed(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        typestr=typestr,
        is_bfloat16=is_bfloat16,
        read_only=read_only,
    )
