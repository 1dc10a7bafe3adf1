"""Drop-ins for three TensorFlow functions, in native code where the dtype allows, TensorFlow's own for the rest.

`keras.optimizers` in here is where SOK v1 had its optimizers.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import tensorflow as tf

from sok.base import _ops
from sok.base.types import DTypeLike, TensorLike
from sok.table.keys import KEY_DTYPES

_SUMMED = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
_INDEX = (tf.int32, tf.int64)


class Unique(NamedTuple):
    """What `unique` gives."""

    y: tf.Tensor
    idx: tf.Tensor


class UniqueWithCounts(NamedTuple):
    """What `unique_with_counts` gives."""

    y: tf.Tensor
    idx: tf.Tensor
    count: tf.Tensor


def unique(x: TensorLike, out_idx: DTypeLike = tf.int32, name: str | None = None) -> Unique:
    """Gives the distinct values of `x` and where each element finds its own: same as `tf.unique`.

    Args:
        x: [N]. Native for int64, int32, uint32 and uint64.
        out_idx: dtype of `idx`, int32 or int64.
        name: of the operation.

    Returns:
        y [U] in order of first appearance, and idx [N] with y[idx] equal to x.

    Raises:
        tf.errors.InvalidArgumentError, ValueError: x is not a vector.

    Not differentiable. Deterministic.

    Example:
        >>> y, idx = unique(tf.constant([7, 3, 7]))
        >>> y.numpy().tolist(), idx.numpy().tolist()
        ([7, 3], [0, 1, 0])
    """
    return Unique(*_unique(x, out_idx, name, with_counts=False)[:2])


def unique_with_counts(x: TensorLike, out_idx: DTypeLike = tf.int32, name: str | None = None) -> UniqueWithCounts:
    """Gives what `unique` gives, and how often each value occurs: same as `tf.unique_with_counts`.

    Args:
        x: [N]. Native for int64, int32, uint32 and uint64.
        out_idx: dtype of `idx` and `count`, int32 or int64.
        name: of the operation.

    Returns:
        y [U], idx [N] and count [U].

    Example:
        >>> unique_with_counts(tf.constant([7, 3, 7])).count.numpy().tolist()
        [2, 1]
    """
    return UniqueWithCounts(*_unique(x, out_idx, name, with_counts=True))


def _unique(
    x: TensorLike, out_idx: DTypeLike, name: str | None, with_counts: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    x, out_idx = tf.convert_to_tensor(x), tf.as_dtype(out_idx)
    if x.dtype in KEY_DTYPES and out_idx in _INDEX:
        return _ops.lib().sok_unique(x, out_idx=out_idx, with_counts=with_counts, name=name)
    return tf.unique_with_counts(x, out_idx=out_idx, name=name)


def unsorted_segment_sum(
    data: TensorLike, segment_ids: TensorLike, num_segments: TensorLike, name: str | None = None
) -> tf.Tensor:
    """Sums the elements of `data` that have the same segment id: same as `tf.math.unsorted_segment_sum`.

    Except that 16-bit floats are added in 32 bits and rounded once.

    Args:
        data: its shape starts with that of `segment_ids`. Native for float32, float64, float16 and bfloat16.
        segment_ids: int32 or int64, any shape and order. What has a negative one is left out.
        num_segments: int32 or int64 scalar, above every segment id.
        name: of the operation.

    Returns:
        [num_segments, ...], zeros where a segment is empty.

    Raises:
        tf.errors.InvalidArgumentError: an id of `num_segments` or more, or shapes that do not fit.

    Differentiable in `data`. Deterministic.

    Example:
        >>> unsorted_segment_sum(tf.constant([1.0, 2.0, 3.0]), tf.constant([1, 0, 1]), 3).numpy().tolist()
        [2.0, 4.0, 0.0]
    """
    data, segment_ids = tf.convert_to_tensor(data), tf.convert_to_tensor(segment_ids)
    num_segments = tf.convert_to_tensor(num_segments)
    if data.dtype in _SUMMED and segment_ids.dtype in _INDEX and num_segments.dtype in _INDEX:
        return _ops.lib().sok_unsorted_segment_sum(data, segment_ids, num_segments, name=name)
    return tf.math.unsorted_segment_sum(data, segment_ids, num_segments, name=name)


def __getattr__(name: str) -> Any:
    # Loading Keras takes seconds, which the functions above need not wait for.
    if name == "keras":
        return importlib.import_module("sok.tf.keras")
    raise AttributeError(f"module 'sok.tf' has no attribute {name!r}")
