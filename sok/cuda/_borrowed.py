"""Arrays on the device that belong to another library: what its protocol says of them, checked before kernels run."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok.cuda import _native

_VERSIONS = (2, 3)  # of __cuda_array_interface__
_HOST, _MANAGED = 0, 2  # SOK_CUDA_HOST_MEMORY, SOK_CUDA_MANAGED_MEMORY


class HasInterface(Protocol):
    """What speaks NVIDIA's protocol, such as Numba's device arrays."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class HasDLPack(Protocol):
    """What speaks DLPack, such as PyTorch's tensors."""

    @property
    def __dlpack__(self) -> Any: ...

    @property
    def __dlpack_device__(self) -> Any: ...


class Borrowed(NamedTuple):
    """What a protocol says of an array."""

    pointer: int  # 0 only where there is nothing
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # bytes; None: as if contiguous
    typestr: str
    is_bfloat16: bool = False  # of which typestr has the words
    read_only: bool = False
    stream: int | None = None  # on which its library works; None: nothing to wait for, or waited for already
    owner: Any = None  # has the memory as long as it lives

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.typestr)

    @property
    def dtype_name(self) -> str:
        return "bfloat16" if self.is_bfloat16 else self.dtype.name

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def on_the_host(name: str, x: object) -> TypeError:
    return TypeError(
        f"`{name}` must be an array on the device. Received: {type(x)} in the memory of the host. Copy it there first: "
        "cupy.asarray(x), numba.cuda.to_device(x), or x.cuda() of PyTorch's."
    )


def on_another_device(name: str, found: int, current: int) -> ValueError:
    return ValueError(
        f"`{name}` must lie on the current device, which is {current}. Received: an array on device {found}. Copy it, "
        f"or call under `with cupy.cuda.Device({found}):` if all arrays and tables of the call are there."
    )


def read_only(name: str, x: object) -> ValueError:
    return ValueError(f"`{name}` must be writable: kernels write into it. Received: {type(x)} that is read-only.")


def by_interface(name: str, x: HasInterface) -> Borrowed:
    """What x says by `__cuda_array_interface__`. Raises TypeError or ValueError naming the argument."""
    said = x.__cuda_array_interface__
    version = said.get("version")
    if version not in _VERSIONS:
        raise TypeError(
            f"`{name}` must have `__cuda_array_interface__` of version 2 or 3. Received: {type(x)} of {version!r}."
        )
    if said.get("mask") is not None:
        raise TypeError(f"`{name}` must have no mask. Received: {type(x)} with one. Fill in what it hides.")
    try:
        dtype = np.dtype(said["typestr"])
    except TypeError as error:
        raise TypeError(f"`{name}` must be of a type of NumPy's. Received: typestr {said['typestr']!r}.") from error
    if not dtype.isnative or dtype.kind not in "biufc":
        raise TypeError(f"`{name}` must be of numbers in this machine's order. Received: typestr {said['typestr']!r}.")
    pointer, is_read_only = said["data"]
    stream, strides = said.get("stream"), said.get("strides")
    if stream == 0:
        raise ValueError(
            f"`{name}`: stream 0 in `__cuda_array_interface__` could be either default stream. Received: it from "
            f"{type(x)}. 1 is the legacy one, 2 that of each thread, None nothing to wait for."
        )
    return Borrowed(
        pointer=int(pointer or 0),
        shape=tuple(map(int, said["shape"])),
        strides=None if strides is None else tuple(map(int, strides)),
        typestr=dtype.str,
        read_only=bool(is_read_only),
        stream=None if stream is None else int(stream),
        owner=x,
    )


def check(name: str, borrowed: Borrowed, device: int) -> None:
    """Raises ValueError for what no kernel may be given: gaps, no memory, that of the host or of another device."""
    shape, strides = borrowed.shape, borrowed.strides
    if any(size < 0 for size in shape) or borrowed.nbytes >= 2**63:
        raise ValueError(f"`{name}` must have a shape. Received: {list(shape)}.")
    if strides is not None and not _is_contiguous(shape, strides, borrowed.dtype.itemsize):
        raise ValueError(
            f"`{name}` must be contiguous, the last dimension innermost. Received: shape {list(shape)} with strides "
            f"{list(strides)} in bytes. Copy it: x.contiguous() of PyTorch's, or cupy.ascontiguousarray(x)."
        )
    if borrowed.nbytes == 0:
        return
    if borrowed.pointer == 0:
        raise ValueError(f"`{name}` must have memory. Received: a null pointer with shape {list(shape)}.")
    if borrowed.pointer % borrowed.dtype.itemsize:
        raise ValueError(
            f"`{name}` must begin at a multiple of {borrowed.dtype.itemsize} bytes, as {borrowed.dtype_name} does. "
            f"Received: address {borrowed.pointer:#x}."
        )
    # Of the last byte too: a shape that says too much often leads out of the device.
    for address in (borrowed.pointer, borrowed.pointer + borrowed.nbytes - 1):
        place, found = _place_of(address)
        if place == _HOST:
            raise ValueError(
                f"`{name}` must lie in the memory of a device from its first byte to its last. Received: address "
                f"{address:#x}, which does not, of shape {list(shape)} at {borrowed.pointer:#x}."
            )
        if place != _MANAGED and found != device:
            raise on_another_device(name, found, device)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    if len(strides) != len(shape):
        return False
    if 0 in shape:
        return True
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _place_of(address: int) -> tuple[int, int]:
    place, device = ctypes.c_int(), ctypes.c_int()
    given = ctypes.c_void_p(address), ctypes.byref(place), ctypes.byref(device)
    _native.check(_native.library().sok_cuda_place_of(*given))
    return place.value, device.value
