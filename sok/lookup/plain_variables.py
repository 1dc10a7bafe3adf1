"""Lookups in ordinary variables: matrices that every worker holds whole, pooled where they lie, many in one op.

Variables of float32 are read by a native op, in place, whether they are resources or references; those of other dtypes
by stock TensorFlow, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok.base import _ops
from sok.base.types import Variable
from sok.lookup.feature import ROWS, Feature

_MAX_ROWS = 2**31 - 1  # what the native op counts


def as_plain_variable(value: object) -> Any | None:
    """The TensorFlow variable [rows, dim] that `value` is or, of Keras 3, holds; None if it is none of those."""
    if isinstance(value, tf.Variable):
        return value
    if _is_partitioned(value):
        parts = list(value)
        return parts[0] if len(parts) == 1 else None
    held = getattr(value, "value", None)  # of a TensorFlow variable it is a method
    if isinstance(held, tf.Variable):
        return held
    # In a layer with mixed precision a variable of Keras 3 gives a copy, cast, of the one that it holds.
    held = getattr(value, "_value", None)
    return held if isinstance(held, tf.Variable) and not _keras_keeps_values_elsewhere() else None


def _keras_keeps_values_elsewhere() -> bool:
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return in_stateless_scope()


def cast_to(value: Variable, variable: Variable) -> tf.DType | None:
    """The dtype in which `value`, behind which `variable` is, wants to be read; None: that of the variable."""
    if value is variable or _is_partitioned(value):
        return None
    dtype = tf.as_dtype(value.dtype)
    return None if dtype == variable.dtype.base_dtype else dtype


def _is_partitioned(value: object) -> TypeGuard[Iterable[Any]]:
    return type(value).__name__ == "PartitionedVariable" and hasattr(value, "_get_partitions")


def lookup(features: Sequence[Feature]) -> list[tf.Tensor]:
    """One vector per segment, or if it is not pooled one per id, of each feature of a variable.

    Args:
        features: of variables [rows, dim] of any float dtype; one may come several times. Their ids are Csr.

    Returns:
        For each [S, dim] or [N, dim] of the variable's dtype. Not collective. Differentiable in the variables and the
        weights; gradients of float32 variables without weights are slices in which no row comes twice.

    Raises:
        ValueError: a variable is no matrix, or its shape is not known.
        tf.errors.InvalidArgumentError: malformed ids, or an id that is no row; names the variable.
        tf.errors.FailedPreconditionError: a variable has no value yet.
    """
    for feature in features:
        _check_shape(feature)
    kinds = [_kind(feature.table) for feature in features]
    outputs: list[Any] = [None] * len(features)
    # One op reads what lies on one device.
    places = [(kind, feature.table.device) for kind, feature in zip(kinds, features, strict=True)]
    for kind, device in dict.fromkeys(place for place in places if place[0] != "other"):
        chosen = [i for i, place in enumerate(places) if place == (kind, device)]
        for i, output in zip(chosen, _pool(kind, [features[i] for i in chosen]), strict=True):
            outputs[i] = output
    for i, kind in enumerate(kinds):
        if kind == "other":
            outputs[i] = _stock(features[i])
    return outputs


def reported(row_splits: tf.Tensor, features: Sequence[Feature]) -> tf.Tensor:
    """`row_splits` of a table's feature; or a report, if `lookup` would raise for the ids of a variable's.

    The lookup of the table raises it, on all workers.
    """
    for feature in features:
        _check_shape(feature)
    return _ops.lib().sok_report_ids(
        row_splits,
        *_ids_of(features),
        names=[feature.name for feature in features],
        num_rows=[_num_rows(feature.table) for feature in features],
    )


def _ids_of(features: Sequence[Feature]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    ids, row_splits, _ = map(list, zip(*(feature.ids.for_ops() for feature in features), strict=True))
    return ids, row_splits


def _num_rows(variable: Any) -> int:
    return tf.TensorShape(variable.shape).as_list()[0]


def _check_shape(feature: Feature) -> None:
    shape = feature.table.shape
    if shape.rank != 2 or not shape.is_fully_defined():
        raise ValueError(f"{feature.source} must be a matrix [rows, dim] of known shape. Received: shape {shape}.")


def _kind(variable: Any) -> str:
    if variable.dtype.base_dtype != tf.float32 or _num_rows(variable) > _MAX_ROWS:
        return "other"
    if isinstance(variable, resource_variable_ops.BaseResourceVariable):
        return "resource"
    return "reference" if variable.dtype._is_ref_dtype else "other"


def _pool(kind: str, features: list[Feature]) -> list[tf.Tensor]:
    distinct = {id(feature.table): feature for feature in features}
    number = {of_variable: i for i, of_variable in enumerate(distinct)}
    variables = [feature.table for feature in distinct.values()]
    shapes = [tf.TensorShape(variable.shape).as_list() for variable in variables]
    if kind == "resource":
        for variable in variables:
            # Without it a tape does not know that the handle stands for this variable.
            resource_variable_ops.variable_accessed(variable)
        op, sources = _ops.lib().sok_variable_pool, [variable.handle for variable in variables]
    else:
        op, sources = _ops.lib().sok_tensor_pool, [tf.convert_to_tensor(variable) for variable in variables]
    outputs = op(
        sources,
        *_ids_of(features),
        names=[feature.name for feature in distinct.values()],
        num_rows=[rows for rows, _ in shapes],
        dims=[dim for _, dim in shapes],
        variable_of=[number[id(feature.table)] for feature in features],
        # Weights may want a gradient, which needs the rows.
        combiners=[ROWS if feature.ids.weights is not None else feature.pooling for feature in features],
    )
    return [
        rows if feature.ids.weights is None else _combine(rows, feature)
        for rows, feature in zip(outputs, features, strict=True)
    ]


def _combine(rows: tf.Tensor, feature: Feature) -> tf.Tensor:
    ids = feature.ids
    index = tf.range(tf.size(ids.keys, out_type=tf.int64))
    return _ops.lib().sok_combine(rows, index, ids.row_splits, ids.weights, combiner=feature.pooling)


def _stock(feature: Feature) -> tf.Tensor:
    variable = feature.table
    given, row_splits, _ = feature.ids.for_ops()
    ids = _ops.lib().sok_check_ids(given, row_splits, variable=feature.name, num_rows=_num_rows(variable))
    rows = tf.nn.embedding_lookup(variable, ids)
    if feature.pooling == ROWS:
        return rows
    with tf.control_dependencies([ids]):  # until then the splits may be a report, which counts nothing
        # Not an identity: of constant splits that are wrong, shape inference would make an error that names nothing.
        row_splits = tf.compat.v1.placeholder_with_default(row_splits, [None])
    if rows.dtype.size == 2:
        # Sums of many 16-bit floats stop growing: as TensorFlow does, add in 32 bits and round once.
        return tf.cast(_pooled(tf.cast(rows, tf.float32), row_splits, feature), rows.dtype)
    return _pooled(rows, row_splits, feature)


def _pooled(rows: tf.Tensor, row_splits: tf.Tensor, feature: Feature) -> tf.Tensor:
    num_segments, weights = tf.size(row_splits, out_type=tf.int64) - 1, feature.ids.weights
    segment = tf.repeat(tf.range(num_segments), row_splits[1:] - row_splits[:-1])
    weights = tf.ones_like(rows[:, 0]) if weights is None else tf.cast(weights, rows.dtype)
    sums = tf.math.unsorted_segment_sum(rows * weights[:, None], segment, num_segments)
    if feature.combiner == "sum":
        return sums
    if feature.combiner == "mean":
        divisor = tf.math.unsorted_segment_sum(weights, segment, num_segments)
    else:
        divisor = tf.sqrt(tf.math.unsorted_segment_sum(weights * weights, segment, num_segments))
    return tf.math.divide_no_nan(sums, divisor[:, None])
