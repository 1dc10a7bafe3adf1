"""Gather and pool on the device: many rows per segment become one vector."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok.cuda import _arrays, _native
from sok.cuda._arrays import Array

COMBINERS = ("sum", "mean", "sqrtn")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of `combine_group`.

    Attributes:
      rows: `[num_rows, D]` float32, or wider: records whose first `dim` columns are read; or what `Table.reading()`
        gives, which needs `dim` too.
      index: `[N]` int64 or int32, the row of each position; a negative one reads as a row of zeros, counted all the
        same.
      row_splits: `[S + 1]` int64, segment s has positions row_splits[s] .. row_splits[s + 1] - 1. None: `hotness`
        positions each.
      hotness: positions per segment without row_splits; 1 is a plain gather.
      weights: `[N]` float32 or None: one each.
      dim: D; None: all columns.
      combiner: "sum", "mean" or "sqrtn", by the rules of tf.nn.embedding_lookup_sparse; an empty segment gives zeros.
    """

    rows: Any
    index: Any
    row_splits: Any = None
    hotness: int = 1
    weights: Any = None
    combiner: str = "sum"
    dim: int | None = None


def combiner_bytes(combiner: str) -> bytes:
    if combiner not in COMBINERS:
        raise ValueError(f"`combiner` must be one of {COMBINERS}. Received: {combiner!r}.")
    return combiner.encode()


def segments_of(row_splits: Array | None, hotness: int, n: int, keep: list[Any]) -> _native.Segments:
    """What the kernels take; arrays that must live as long go to `keep`."""
    if row_splits is not None:
        splits = _arrays.vector("row_splits", row_splits, ("int64",))
        if len(splits) == 0:
            raise ValueError("`row_splits` must have one value more than there are segments. Received none.")
        keep.append(splits)
        return _native.Segments(_arrays.address(splits), 0, len(splits) - 1, n)
    if hotness < 1 or n % hotness != 0:
        raise ValueError(f"`hotness` must be at least 1 and divide the {n} positions. Received: {hotness}.")
    return _native.Segments(None, hotness, n // hotness, n)


def _rows_of(name: str, rows: Any, dim: int | None) -> tuple[_native.Rows, int, int, Any]:
    """Where the rows lie, how many there are, how many columns each has, and what must live as long."""
    native = getattr(rows, "rows", None)
    if isinstance(native, _native.Rows):  # of a table
        if dim is None:
            raise ValueError(f"`dim` must be given where `{name}` is a table's.")
        return native, rows.num_rows, native.stride, rows
    rows = _arrays.matrix(name, rows, ("float32",))
    return _native.Rows(None, _arrays.address(rows), 0, 0, rows.shape[1]), rows.shape[0], rows.shape[1], rows


def combine_group(features: Sequence[Feature], *, dtype: str = "float32", first_bad: Array | None = None) -> list[Any]:
    """Pools any number of features, of any widths and tables, in one launch. In stream order; does not wait;
    repeats bit for bit.

    Args:
      features: F of them.
      dtype: of the outputs: "float32", "float16" or "bfloat16" (given as uint16 words). Sums are taken in float32.
      first_bad: `[F]` uint64 on the device, set to 2^64 - 1, or None. Lowered to the first position whose index is
        not below num_rows (it reads as zeros), or to N + s for a segment s whose row_splits make no sense (it is
        empty).

    Returns:
      For each feature `[S, D]`: columns of one matrix `[S, sum of D]` where all have equally many segments.

    Raises:
      TypeError, ValueError: arguments of another dtype or shape.
    """
    if dtype not in _arrays.FLOATS:
        raise ValueError(f"`dtype` must be one of {_arrays.FLOATS}. Received: {dtype!r}.")
    keep: list[Any] = []
    made = (_native.Feature * max(1, len(features)))()
    for k, f in enumerate(features):
        index = _arrays.ids(f"features[{k}].index", f.index)
        where, num_rows, columns, held = _rows_of(f"features[{k}].rows", f.rows, f.dim)
        weights = _arrays.optional(f"features[{k}].weights", f.weights, ("float32",), len(index))
        keep += [index, held, weights]
        one = made[k]
        one.rows, one.num_rows, one.dim = where, num_rows, columns if f.dim is None else f.dim
        if one.dim > columns:
            raise ValueError(f"`features[{k}].dim` must be at most {columns}. Received: {f.dim}.")
        one.index = _arrays.address(index)
        one.segments = segments_of(f.row_splits, f.hotness, len(index), keep)
        one.weights = _arrays.address(weights)
        one.combiner = combiner_bytes(f.combiner)
    in_memory = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
    counts = {made[k].segments.segments for k in range(len(features))}
    outputs = []
    if len(counts) == 1:
        widths = [int(made[k].dim) for k in range(len(features))]
        whole = _arrays.empty((counts.pop(), sum(widths)), in_memory)
        ends = np.cumsum(widths)
        outputs = [whole[:, end - width : end] for end, width in zip(ends, widths, strict=True)]
    else:
        outputs = [_arrays.empty((made[k].segments.segments, made[k].dim), in_memory) for k in range(len(features))]
    for k, output in enumerate(outputs):
        made[k].output = _arrays.address(output)
        made[k].output_stride = output.strides[0] // output.itemsize if output.shape[0] > 1 else max(1, output.shape[1])
    _native.call("combine_group", made, len(features), dtype, _arrays.bad(first_bad, len(features)))
    return outputs


def combine(
    rows: Array,
    index: Array,
    row_splits: Array | None = None,
    *,
    hotness: int = 1,
    weights: Array | None = None,
    combiner: str = "sum",
    dtype: str = "float32",
    first_bad: Array | None = None,
) -> Any:
    """`combine_group` of one feature: gives `[S, D]`, in stream order.

    Example:
        >>> rows = cupy.eye(3, dtype="float32")                                                      # doctest: +SKIP
        >>> combine(rows, cupy.array([0, 2, 1]), cupy.array([0, 2, 2, 3]), combiner="mean")          # doctest: +SKIP
        array([[0.5, 0. , 0.5],
               [0. , 0. , 0. ],
               [0. , 1. , 0. ]], dtype=float32)
    """
    feature = Feature(rows, index, row_splits, hotness, weights, combiner)
    return combine_group([feature], dtype=dtype, first_bad=first_bad)[0]


def expand_segments(
    row_splits: Array | None = None, *, n: int, hotness: int = 1, weights: Array | None = None, combiner: str = "sum"
) -> tuple[Any, Any]:
    """For each of n positions, the segment that holds it `[n]` (uint32) and what its row was multiplied with `[n]`
    (float32): the gradient of `combine` in row index[i] is factor[i] * grad[segment[i]]. In stream order; does not
    wait."""
    keep: list[Any] = []
    segments = segments_of(row_splits, hotness, n, keep)
    weights = _arrays.optional("weights", weights, ("float32",), n)
    segment, factor = _arrays.empty(n, np.uint32), _arrays.empty(n, np.float32)
    _native.call("expand_segments", ctypes.byref(segments), weights, combiner_bytes(combiner), segment, factor)
    return segment, factor


def combine_grad_weights(
    grad: Array,
    rows: Array,
    index: Array,
    row_splits: Array | None = None,
    *,
    weights: Array,
    hotness: int = 1,
    combiner: str = "sum",
    first_bad: Array | None = None,
) -> Any:
    """The gradient of `combine` in its weights. In stream order; does not wait; repeats bit for bit.

    Args:
      grad: `[S, D]` float32, what came back for the vectors.
      rows, index, row_splits, weights, hotness, combiner: as given to `combine`; D is grad's.
      first_bad: `[1]` uint64 as in `combine_group`, or None.

    Returns:
      `[N]` float32; zeros where no segment has a position.

    Raises:
      TypeError, ValueError: arguments of another dtype or shape.
    """
    grad, index = _arrays.matrix("grad", grad, ("float32",)), _arrays.ids("index", index)
    keep: list[Any] = [grad, index]
    where, num_rows, columns, held = _rows_of("rows", rows, grad.shape[1])
    if columns < grad.shape[1]:
        raise ValueError(f"`rows` must have the {grad.shape[1]} columns of `grad`. Received: {columns}.")
    weights = _arrays.vector("weights", weights, ("float32",), len(index))
    segments = segments_of(row_splits, hotness, len(index), keep)
    _check_segments(grad, segments)
    keep.append(held)
    feature = _native.Feature(
        where,
        num_rows,
        grad.shape[1],
        _arrays.address(index),
        segments,
        _arrays.address(weights),
        combiner_bytes(combiner),
    )
    result = _arrays.empty(len(index), np.float32)
    if not len(index):  # an array without elements may have no address, which would say that there are no weights
        return result
    _native.call("combine_grad_weights", ctypes.byref(feature), grad, result, _arrays.bad(first_bad, 1))
    return result


def combine_grad_rows(
    grad: Array,
    index: Array,
    row_splits: Array | None = None,
    *,
    num_rows: int,
    weights: Array | None = None,
    hotness: int = 1,
    combiner: str = "sum",
    first_bad: Array | None = None,
) -> Any:
    """The gradient of `combine` in a matrix of rows. In stream order; does not wait; repeats bit for bit.

    Args:
      grad: `[S, D]` float32, what came back for the vectors.
      index, row_splits, weights, hotness, combiner: as given to `combine`. What is outside of [0, num_rows) is dropped.
      num_rows: M, of the matrix.
      first_bad: `[1]` uint64 as in `combine_group`, or None; lowered to the first position that was dropped.

    Returns:
      `[M, D]` float32. For rows of tables, of which a batch has few, take `sum_rows`.

    Raises:
      TypeError, ValueError: arguments of another dtype or shape, or too many of them.
    """
    grad, index = _arrays.matrix("grad", grad, ("float32",)), _arrays.ids("index", index)
    keep: list[Any] = [grad, index]
    weights = _arrays.optional("weights", weights, ("float32",), len(index))
    segments = segments_of(row_splits, hotness, len(index), keep)
    _check_segments(grad, segments)
    result = _arrays.empty((num_rows, grad.shape[1]), np.float32)
    given = grad, index, ctypes.byref(segments), weights, num_rows, int(grad.shape[1]), combiner_bytes(combiner)
    _native.call("combine_grad_rows", *given, result, _arrays.bad(first_bad, 1))
    return result


def _check_segments(grad: Any, segments: _native.Segments) -> None:
    if grad.shape[0] != segments.segments:
        raise ValueError(f"`grad` must have a row for each of {segments.segments} segments. Received: {grad.shape[0]}.")
