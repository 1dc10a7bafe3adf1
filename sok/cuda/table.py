"""An embedding table in the memory of a device."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sok.cuda import _arrays, _native
from sok.cuda._arrays import Array

INITIALIZERS = ("constant", "uniform", "normal", "truncated_normal", "bank")
_SIZES = ("dim", "capacity", "hashed", "is_unsigned", "world_size", "rank", "owner", "num_keys")


class _Config(ctypes.Structure):
    """SokCudaTableConfig."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        *[(size, ctypes.c_int64) for size in _SIZES],
        ("initializer", ctypes.c_char_p),
        ("a", ctypes.c_float),
        ("b", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("bank", ctypes.c_void_p),
        ("bank_rows", ctypes.c_int64),
    ]


class Found(NamedTuple):
    """What a lookup gives: rows `[N, D]` float32 and their ids `[N]` int64; id -1 has no row."""

    rows: Any
    row_ids: Any


class Reading(NamedTuple):
    """Where the records of a table lie, for kernels on the current stream."""

    rows: _native.Rows
    num_rows: int


class Table:
    """Keys, rows and optimizer slots of one shard, on the current device.

    Every 64-bit key is legal. A row that nobody has stored is a function of (seed, key), the same as on the CPU. Calls
    may come on several streams: those that read run side by side, those that write alone, in the order of the calls.

    Args:
      name: for messages.
      dim: D, floats per row.
      capacity: most rows of this shard.
      hashed: False: the key is the row number (times the number of ranks).
      initializer: "constant" (a), "uniform" (in [a, b)), "normal", "truncated_normal" (mean a, deviation b) or "bank".
      bank: `[P, D]` float32 on the host, for "bank".
      unsigned: whether keys are uint64 or uint32: how messages print them, and what key % world_size means.
      world_size, rank: of the job; the shard holds the keys with key % world_size == rank.
      memory_bytes: most device memory that the table may take; None: what the device has.

    Raises:
      ValueError, TypeError: a configuration that makes no sense; a bank on a device.
      OutOfMemoryError: an identity table takes its memory at once.

    Example (needs a GPU):
      >>> import cupy, sok.cuda                                                   # doctest: +SKIP
      >>> table = sok.cuda.Table("item", dim=2, capacity=1000)                    # doctest: +SKIP
      >>> table.lookup(cupy.array([7, 3, 7]), insert=True).row_ids                # doctest: +SKIP
      array([0, 1, 0])
    """

    def __init__(
        self,
        name: str,
        *,
        dim: int,
        capacity: int,
        hashed: bool = True,
        initializer: str = "uniform",
        a: float = -0.05,
        b: float = 0.05,
        seed: int = 0,
        bank: Array | None = None,
        unsigned: bool = False,
        world_size: int = 1,
        rank: int = 0,
        memory_bytes: int | None = None,
    ) -> None:
        self.name, self.dim, self.capacity = name, dim, capacity
        if memory_bytes is not None and memory_bytes < 1:
            raise ValueError(f"`memory_bytes` must be at least 1, or None. Received: {memory_bytes}.")
        _check_initializer(initializer, bank)
        if hasattr(bank, "__cuda_array_interface__"):
            raise TypeError(f"`bank` must lie in the memory of the host. Received: {type(bank)} on a device.")
        held = None if bank is None else np.ascontiguousarray(bank, np.float32)
        if held is not None and (held.ndim != 2 or held.shape[1] != dim):
            raise ValueError(f"`bank` must have shape [P, {dim}]. Received: {list(held.shape)}.")
        sizes = (dim, capacity, hashed, unsigned, world_size, rank, -1, 0)
        config = _Config(name.encode(), *sizes, initializer.encode(), a, b, seed % 2**64)
        if held is not None:
            config.bank, config.bank_rows = held.ctypes.data, len(held)
        lib, self._handle = _native.library(), ctypes.c_void_p()
        lib.sok_cuda_table_destroy.restype = None
        budget = ctypes.c_int64(memory_bytes or 0)
        _native.check(lib.sok_cuda_table_create(ctypes.byref(config), budget, ctypes.byref(self._handle)))
        weakref.finalize(self, lib.sok_cuda_table_destroy, self._handle)

    @property
    def handle(self) -> ctypes.c_void_p:
        """The table in the C interface."""
        return self._handle

    def lookup(self, keys: Array, *, insert: bool) -> Found:
        """Finds the rows of keys, in stream order.

        Args:
          keys: `[N]` int64, uint64, int32 or uint32; may repeat; N may be 0.
          insert: True: missing keys get fresh rows, numbered by first appearance, all or none. False: they read as
            their fresh rows with id -1, and nothing is stored.

        Returns:
          Found. Keys that the shard cannot hold read as zeros with id -1, and `check` names one.

        Raises:
          TableFullError, OutOfMemoryError: no key was stored.
          TypeError, ValueError: keys of another dtype or shape.

        Waits for the device only where inserting may make the table grow or overflow.
        """
        words = _arrays.words("keys", keys)
        rows = _arrays.empty((len(words), self.dim), np.float32)
        row_ids = _arrays.empty(len(words), np.int64)
        self._call("lookup", words, len(words), int(insert), rows, row_ids)
        return Found(rows, row_ids)

    def find(self, keys: Array) -> Any:
        """Row ids `[N]` int64 of keys, -1 where there is none; no row is read. In stream order; raises as `lookup`."""
        return self._ids(keys, insert=False)

    def find_or_insert(self, keys: Array) -> Any:
        """Row ids `[N]` int64 of keys; missing ones get fresh rows. In stream order; raises as `lookup`."""
        return self._ids(keys, insert=True)

    def apply(
        self,
        rule: str,
        hyper: Sequence[float],
        row_ids: Array,
        grads: Array,
        *,
        step: int = 1,
        slot_set: str = "optimizer",
        nonfinite: str = "allow",
        grad_scale: float = 1.0,
        num_grads: Array | None = None,
    ) -> None:
        """Applies an optimizer's rule to distinct rows, in stream order.

        Args:
          rule, hyper, step: as `update_rows`.
          row_ids: `[N]` int64 of a lookup; -1 and rows erased since are passed over.
          grads: `[N, D]` float32, summed over duplicates.
          slot_set: whose slots; attached on first use, which moves all rows.
          nonfinite: what NaN or infinity in a gradient does: "allow", "skip" its row, or "raise": nothing changes, and
            `check` says so.
          grad_scale: gradients are multiplied with it first.
          num_grads: `[1]` int64 on the device: how many of the N there are; None: all.

        Raises:
          ValueError: an unknown rule, or a slot set of another one.
          OutOfMemoryError: no room for the slots; nothing changed.
        """
        row_ids = _arrays.ids("row_ids", row_ids)
        grads = _arrays.matrix("grads", grads, ("float32",), (len(row_ids), self.dim))
        num_grads = _arrays.optional("num_grads", num_grads, ("int64",), 1)
        settings = *rule_args(rule, hyper, step), slot_set, nonfinite, float(grad_scale)
        self._call("apply", *settings, row_ids, grads, len(row_ids), num_grads)

    def assign(self, keys: Array, rows: Array) -> None:
        """Stores rows `[N, D]` float32 for keys `[N]`, making them where needed; the last of equal keys counts.

        Keys of other ranks are passed over. In stream order. Raises as `lookup`, and ValueError for a key outside an
        identity table."""
        words = _arrays.words("keys", keys)
        rows = _arrays.matrix("rows", rows, ("float32",), (len(words), self.dim))
        self._call("assign", words, rows, len(words))

    def assign_slots(
        self,
        rule: str,
        hyper: Sequence[float],
        keys: Array,
        slots: Array,
        *,
        step: int = 1,
        slot_set: str = "optimizer",
    ) -> None:
        """Stores slots `[N, slots of the rule * D]` float32 for keys `[N]`, as `assign` does weights. In stream
        order."""
        words = _arrays.words("keys", keys)
        slots = _arrays.matrix("slots", slots, ("float32",), (len(words), None))
        self._call("assign_slots", *rule_args(rule, hyper, step), slot_set, words, slots, len(words), slots.shape[1])

    def erase(self, keys: Array) -> None:
        """Removes keys `[N]`; those that are not there are passed over. Their row numbers are used again. In stream
        order."""
        words = _arrays.words("keys", keys)
        self._call("erase", words, len(words))

    def export(self, slot_set: str | None = None) -> tuple[Any, Any, Any]:
        """Keys `[U]` uint64, rows `[U, D]`, and slots `[U, S]` of one set or None, in the order of rows. Waits.

        Raises RuntimeError for a slot set that no optimizer has used."""
        n = self.size()
        keys, row_ids = _arrays.empty(n, np.uint64), _arrays.empty(n, np.int64)
        rows = _arrays.empty((n, self.dim), np.float32)
        self._call("export", keys, row_ids, n)
        self._call("weights", row_ids, n, rows)
        if slot_set is None:
            return keys, rows, None
        slots = _arrays.empty((n, self._number("slot_floats", slot_set)), np.float32)
        self._call("slots", slot_set, row_ids, n, slots)
        return keys, rows, slots

    def reserve(self, n: int) -> None:
        """Makes room for n rows in all: up to there nothing grows. Raises ValueError, OutOfMemoryError. Waits."""
        self._call("reserve", n)

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Meanwhile work on the current stream sees no row move or change; call nothing else of the table."""
        rows, num_rows, held = _native.Rows(), ctypes.c_int64(), ctypes.c_void_p()
        self._call("read_begin", ctypes.byref(rows), ctypes.byref(num_rows), ctypes.byref(held))
        end = _native.library().sok_cuda_table_read_end
        end.restype = None
        try:
            yield Reading(rows, num_rows.value)
        finally:
            end(held)

    def size(self) -> int:
        """Rows in use. Waits."""
        return self._number("size_to_host")

    def memory_bytes(self) -> int:
        """Device memory that the table has."""
        return self._number("memory_bytes")

    def check(self) -> None:
        """Raises ValueError for a bad key or gradient since the last time this was called. Waits."""
        self._call("check_to_host")

    def _ids(self, keys: Any, *, insert: bool) -> Any:
        words = _arrays.words("keys", keys)
        row_ids = _arrays.empty(len(words), np.int64)
        self._call("lookup", words, len(words), int(insert), None, row_ids)
        return row_ids

    def _number(self, name: str, *args: Any) -> int:
        number = ctypes.c_int64()
        self._call(name, *args, ctypes.byref(number))
        return number.value

    def _call(self, name: str, *args: Any) -> None:
        _native.call("table_" + name, self._handle, *args)


def fill_rows(
    keys: Array,
    dim: int,
    *,
    initializer: str = "uniform",
    a: float = -0.05,
    b: float = 0.05,
    seed: int = 0,
    bank: Array | None = None,
) -> Any:
    """Fresh rows `[N, dim]` float32 of keys `[N]`, as a Table makes them, in stream order; bank is `[P, dim]` on the
    device."""
    words = _arrays.words("keys", keys)
    _check_initializer(initializer, bank)
    rows = _arrays.empty((len(words), dim), np.float32)
    held = None if bank is None else _arrays.matrix("bank", bank, ("float32",), (None, dim))
    settings = initializer, float(a), float(b), ctypes.c_uint64(seed % 2**64), held, 0 if held is None else len(held)
    _native.call("fill_rows", *settings, words, len(words), dim, rows)
    return rows


def _check_initializer(initializer: str, bank: Any) -> None:
    if initializer not in INITIALIZERS:
        raise ValueError(f"`initializer` must be one of {INITIALIZERS}. Received: {initializer!r}.")
    if (bank is not None) != (initializer == "bank"):
        raise ValueError('`bank` must be given with initializer="bank", and only then.')


def rule_args(rule: str, hyper: Sequence[float], step: int) -> tuple[Any, ...]:
    """The arguments that name an optimizer's rule in calls of tables."""
    return rule, (ctypes.c_double * len(hyper))(*hyper), len(hyper), int(step)
