"""Gradients on the device: summed per row, and applied to rows by the optimizers' rules."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok.cuda import _arrays, _native
from sok.cuda._arrays import Array
from sok.cuda.combining import combiner_bytes, segments_of
from sok.cuda.table import rule_args
from sok.table.rules import RULES


def _float_type(name: str, x: Any) -> tuple[Any, str]:
    """A matrix of a floating-point type, and the type's name; uint16 words are bfloat16."""
    x = _arrays.matrix(name, x, (*_arrays.FLOATS, "uint16"))
    return x, "bfloat16" if x.dtype.name == "uint16" else x.dtype.name


def unsorted_segment_sum(
    data: Array, segment_ids: Array, num_segments: int, *, deterministic: bool = True, first_bad: Array | None = None
) -> Any:
    """Sums rows by segment in float32, as tf.math.unsorted_segment_sum. In stream order; does not wait.

    Args:
      data: `[N, D]` float32, float16, or bfloat16 (as such, or as uint16 words).
      segment_ids: `[N]` int64 or int32; negative ones are dropped.
      deterministic: results repeat bit for bit; else rows are added by atomics, in any order.
      first_bad: `[1]` uint64 on the device, set to 2^64 - 1, or None: lowered to the first position whose id is not
        below num_segments, which is dropped. See `check`.

    Returns:
      `[num_segments, D]` float32.

    Raises:
      TypeError, ValueError: arguments of another dtype or shape; 2^31 - 1 rows or segments and more.
    """
    data, kind = _float_type("data", data)
    ids = _arrays.ids("segment_ids", segment_ids, data.shape[0])
    if num_segments < 0:
        raise ValueError(f"`num_segments` must not be negative. Received: {num_segments}.")
    n, dim = (int(size) for size in data.shape)
    sums = _arrays.empty((num_segments, dim), np.float32)
    given = data, kind, ids, n, dim, num_segments, bool(deterministic)
    _native.call("unsorted_segment_sum", *given, sums, _arrays.bad(first_bad, 1))
    return sums


@dataclasses.dataclass(frozen=True)
class Addends:
    """The gradients of one lookup: position i adds to row row_ids[i] the row of `grad` of its segment, times what
    pooling multiplied it with. Nothing pooled: hotness 1, `grad` has a row for each position.

    Attributes:
      row_ids: `[N]` int64 or int32; negative ones are dropped.
      grad: `[S, D]`, all of a call of one dtype.
      table: its number in the call's `table_rows`.
      row_splits, hotness, weights, combiner: as in `Feature`.
    """

    row_ids: Any
    grad: Any
    table: int = 0
    row_splits: Any = None
    hotness: int = 1
    weights: Any = None
    combiner: str = "sum"


class RowSums(NamedTuple):
    """Distinct rows by table and row id, padded to all addends: the first num_sums `[1]` are written."""

    tables: Any
    row_ids: Any
    sums: Any
    num_sums: Any


class NativeAddends(NamedTuple):
    """Addends as the C interface takes them."""

    made: Any
    kind: str  # of the gradients
    keep: list[Any]  # what the addresses are of

    @property
    def lengths(self) -> list[int]:
        """How many positions each has."""
        return [one.segments.n for one in self.made]


def native_addends(addends: Sequence[Addends], dim_of: Callable[[Addends], int] | None = None) -> NativeAddends:
    """Checks addends, whose gradients must have dim_of(them) columns, or those of the first, and one type. Raises
    TypeError, ValueError."""
    keep: list[Any] = []
    made, kind, dim = (_native.Addends * len(addends))(), "float32", 0
    for k, a in enumerate(addends):
        row_ids = _arrays.ids(f"addends[{k}].row_ids", a.row_ids)
        grad, this_kind = _float_type(f"addends[{k}].grad", a.grad)
        kind = this_kind if k == 0 else kind
        if dim_of is not None or k == 0:
            dim = int(grad.shape[1]) if dim_of is None else dim_of(a)
        if (grad.shape[1], this_kind) != (dim, kind):
            raise ValueError(
                f"`addends[{k}].grad` must be [?, {dim}] {kind} as the others. "
                f"Received: {list(grad.shape)} {this_kind}."
            )
        one = made[k]
        one.segments = segments_of(a.row_splits, a.hotness, len(row_ids), keep)
        if one.segments.segments != grad.shape[0]:
            raise ValueError(
                f"`addends[{k}].grad` must have a row for each of {one.segments.segments} segments. "
                f"Received: {grad.shape[0]}."
            )
        weights = _arrays.optional(f"addends[{k}].weights", a.weights, ("float32",), len(row_ids))
        keep += [row_ids, grad, weights]
        one.table = a.table
        one.row_ids, one.values, one.weights = (_arrays.address(x) for x in (row_ids, grad, weights))
        one.values_stride = grad.shape[1]
        one.combiner = combiner_bytes(a.combiner)
    return NativeAddends(made, kind, keep)


def sum_rows(addends: Sequence[Addends], table_rows: Sequence[int], *, first_bad: Array | None = None) -> RowSums:
    """Sums gradients per row, for all tables of one width at once. In stream order; does not wait; repeats bit for
    bit.

    Args:
      addends: of one lookup each; several may belong to one table.
      table_rows: for each table, its number of rows; fewer than 2^32 - 1 together.
      first_bad: `[len(addends)]` uint64 on the device, set to 2^64 - 1, or None: lowered to the first position whose
        row id its table does not have; such addends are dropped.

    Raises:
      TypeError, ValueError: arguments of another dtype or shape; widths that differ; no addends at all.
    """
    if not addends:
        raise ValueError("`addends` must hold those of one lookup at least. Received none.")
    given = native_addends(addends)
    n, dim = sum(given.lengths), int(given.made[0].values_stride)
    out = RowSums(
        _arrays.empty(n, np.int32),
        _arrays.empty(n, np.int64),
        _arrays.empty((n, dim), np.float32),
        _arrays.empty(1, np.int64),
    )
    rows = (ctypes.c_int64 * max(1, len(table_rows)))(*table_rows)
    settings = given.made, len(addends), rows, len(table_rows), dim, given.kind
    bad = _arrays.bad(first_bad, len(addends))
    _native.call("sum_rows", *settings, out.row_ids, out.tables, out.sums, out.num_sums, bad)
    return out


class Decay:
    """The calls so far of the exact Adam on one table: rows that miss some catch up when they are next read or
    changed."""

    def __init__(self, num_rows: int):
        self._handle = ctypes.c_void_p()
        self._library = _native.library()
        _native.check(self._library.sok_cuda_decay_create(ctypes.byref(self._handle)))
        self.stamps = _arrays.module().zeros(num_rows, np.uint32)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.sok_cuda_decay_destroy(self._handle)


@dataclasses.dataclass(frozen=True)
class Records:
    """The rows of a table, `[num_rows, stride]` float32, that updates change in place: D weights first, slots from
    column slot_offset on.

    decay: for the rule "adam"."""

    values: Any
    slot_offset: int = 0
    decay: Decay | None = None

    def _native_update(self, name: str, dim: int, rule: str) -> _native.Update:
        x = _arrays.written(name, self.values, "float32", (None, None))
        slot_floats = RULES[rule].slot_floats(dim)
        if x.shape[1] < dim or (
            slot_floats and (self.slot_offset < dim or x.shape[1] < self.slot_offset + slot_floats)
        ):
            raise ValueError(
                f"`{name}` must have {dim} weights and from column {self.slot_offset} on {slot_floats} floats of "
                f"slots in each row. Received: {x.shape[1]} columns."
            )
        update = _native.Update()
        update.rows = _native.Rows(None, _arrays.address(x), 0, 0, x.shape[1])
        update.num_rows, update.slot_offset = x.shape[0], self.slot_offset
        if self.decay is not None:
            if len(self.decay.stamps) < x.shape[0]:
                raise ValueError(f"the decay of `{name}` is for {len(self.decay.stamps)} rows, not {x.shape[0]}.")
            update.decay, update.stamps = self.decay._handle, _arrays.address(self.decay.stamps)
        return update


def _known_rule(rule: str, hyper: Sequence[float], step: int) -> tuple[Any, ...]:
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {tuple(RULES)}. Received: {rule!r}.")
    return rule_args(rule, hyper, step)


def update_rows(
    rule: str,
    hyper: Sequence[float],
    tables: Sequence[Records],
    row_ids: Array,
    grads: Array,
    *,
    table_of: Array | None = None,
    num_grads: Array | None = None,
    step: int = 1,
    grad_scale: float = 1.0,
    nonfinite: str = "allow",
    first_bad: Array | None = None,
) -> None:
    """Applies an optimizer's rule to rows in place, once per row: one launch for any number of tables. In stream order.

    Args:
      rule: "sgd", "adagrad", "lazy_adam" or "adam".
      hyper: learning rate, then those of `sok.table.rules.RULES`: for adagrad initial accumulator and epsilon, for the
        Adams beta_1, beta_2, epsilon.
      tables: their records, which are written into; "adam" needs a `Decay` in each.
      row_ids: `[N]` int64, distinct within a table (`sum_rows` gives them so); negative ones are skipped.
      grads: `[N, D]` float32, float16 or bfloat16.
      table_of: `[N]` int32, the table of each; None: all are of the first.
      num_grads: `[1]` int64 on the device: how many of the N there are; None: all.
      step: t of Adam's bias correction, from 1.
      grad_scale: what gradients are multiplied with first: the inverse of a loss scale.
      nonfinite: a gradient that holds a NaN or an infinity is let through ("allow"), its row left as it is ("skip"),
        or every row left as it is ("raise"), which `check` then tells. With "adam" and "raise" the call waits,
        and raises itself.
      first_bad: `[1]` uint64 on the device, set to 2^64 - 1: where a refused gradient is reported. "raise" needs it.

    Raises:
      TypeError, ValueError: arguments of another dtype or shape, records too narrow, a rule or mode that does not
      exist.
    """
    settings = _known_rule(rule, hyper, step)
    if nonfinite not in ("allow", "skip", "raise"):
        raise ValueError(f"`nonfinite` must be 'allow', 'skip' or 'raise'. Received: {nonfinite!r}.")
    grads, kind = _float_type("grads", grads)
    n, dim = (int(size) for size in grads.shape)
    row_ids = _arrays.ids("row_ids", row_ids, n)
    table_of = _arrays.optional("table_of", table_of, ("int32",), n)
    num_grads = _arrays.optional("num_grads", num_grads, ("int64",), 1)
    made = (_native.Update * max(1, len(tables)))()
    for k, table in enumerate(tables):
        made[k] = table._native_update(f"tables[{k}].values", dim, rule)
    given = table_of, row_ids, grads, kind, n, num_grads, dim, float(grad_scale), nonfinite
    _native.call("update_rows", *settings, made, len(tables), *given, _arrays.bad(first_bad, 1))


def settle_rows(rule: str, hyper: Sequence[float], table: Records, row_ids: Array, dim: int, *, step: int = 1) -> None:
    """Brings rows up to the last call of "adam", so that they may be read. Row ids may come more than once. In stream
    order; does not wait."""
    row_ids = _arrays.ids("row_ids", row_ids)
    update = table._native_update("table.values", dim, rule)
    settings = _known_rule(rule, hyper, step)
    _native.call("settle_rows", *settings, ctypes.byref(update), row_ids, len(row_ids), dim)


def check(first_bad: Array | None, row_ids: Array | None) -> None:
    """Raises ValueError naming position and row id if `update_rows` refused a gradient. In stream order; waits."""
    ids = _arrays.ids("row_ids", row_ids)
    _native.call("throw_if_bad_to_host", _arrays.bad(first_bad, 1), ids, len(ids))
