"""What a person passes to a lookup, as keys and row splits.

Sizes that are only known when the step runs are not checked here by raising: a rank that stops before the exchange
leaves its peers waiting. They become a report in place of the row splits, which the lookup raises on every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from sok.base import _ops, masks
from sok.base.types import Ids, Shaped
from sok.lookup.feature import ROWS, Csr, Feature
from sok.table.keys import as_keys


def describe(inputs: object) -> str:
    """A short text that says what came, for messages."""
    if isinstance(inputs, tf.RaggedTensor):
        return f"a RaggedTensor of shape {inputs.shape} with ragged_rank {inputs.ragged_rank}, {inputs.dtype.name}"
    if isinstance(inputs, tf.SparseTensor):
        return f"a SparseTensor of shape {inputs.shape}, {inputs.dtype.name}"
    if isinstance(inputs, Shaped):
        return f"a dense tensor of shape {tuple(sizes(inputs) or ())}, {getattr(inputs.dtype, 'name', inputs.dtype)}"
    return repr(inputs)


def sizes(tensor: Shaped) -> list[int | None] | None:
    """The static shape as a list of integers, which shapes do not hold with v2 behaviour off; None: rank unknown."""
    shape = tf.TensorShape(tensor.shape)
    return None if shape.rank is None else shape.as_list()


def _error(inputs: Any, feature: Feature) -> ValueError:
    if feature.ids_called != "inputs":  # not the input of a layer, so nobody spoke of slots
        return ValueError(
            f"{feature.label} must be a SparseTensor [batch, n], a RaggedTensor [batch, None] or a dense tensor "
            f"[batch, n]. Received: {describe(inputs)}."
        )
    return _wrong_slots(inputs, feature.slot_num)


def check_symbol(symbol: Shaped, slot_num: int) -> None:
    """`ValueError` if a symbolic input of Keras can hold no batch of `slot_num` features, whatever is not known yet."""
    static = sizes(symbol)
    if static is None:
        return
    is_full = not any(getattr(symbol, form, False) for form in ("sparse", "ragged")) and isinstance(
        getattr(symbol, "type_spec", None), (tf.TensorSpec, type(None))
    )
    has_slots = len(static) == 3 or (len(static) == 2 and is_full and slot_num > 1)
    if len(static) not in (2, 3) or (has_slots and static[1] not in (slot_num, None)):
        raise _wrong_slots(symbol, slot_num)


def _wrong_slots(inputs: Any, slot_num: int) -> ValueError:
    accepted = (
        f"a SparseTensor with dense_shape [batch * {slot_num}, max_nnz] or [batch, {slot_num}, n], a RaggedTensor "
        f"[batch, {slot_num}, None] or [batch * {slot_num}, None], or a dense tensor [batch, {slot_num}, n] or "
    )
    accepted += "[batch, n]" if slot_num == 1 else f"[batch, {slot_num}] with one id each"
    return ValueError(f"`inputs` must be {accepted} (slot_num = {slot_num}). Received: {describe(inputs)}.")


def _keys_of(keys: Any, feature: Feature) -> tf.Tensor:
    return as_keys(keys, feature.key_dtype, feature.source, feature.label)


def _check(splits: tf.Tensor, problem: str, ok: tf.Tensor, detail: tf.Tensor) -> tf.Tensor:
    """`splits`, or a report of the problem if not `ok`."""
    return _ops.lib().sok_check_input(splits, ok, detail, problem=problem)


def _check_slot_num(splits: tf.Tensor, came: tf.Tensor, slot_num: int) -> tf.Tensor:
    return _check(splits, "wrong_slot_num", tf.equal(came, slot_num), came)


def _check_whole(splits: tf.Tensor, num_rows: tf.Tensor, slot_num: int) -> tf.Tensor:
    if slot_num == 1:
        return splits
    return _check(splits, "rows_not_whole", tf.equal(num_rows % slot_num, 0), num_rows)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Weights in the order in which the ids lie there, and whether they stand where the ids do."""

    flat: tf.Tensor  # [N] float32 or float64
    fit: tf.Tensor  # []


def _weights_of(feature: Feature, inputs: Any, num_ids: tf.Tensor) -> _Weights | None:
    weights = feature.weights
    if weights is None:
        return None
    for form in (tf.SparseTensor, tf.RaggedTensor):
        if isinstance(inputs, form) != isinstance(weights, form):
            raise _wrong_weights(feature, inputs, weights)
    if isinstance(inputs, tf.SparseTensor):
        values, pairs = weights.values, [(weights.dense_shape, inputs.dense_shape), (weights.indices, inputs.indices)]
    elif isinstance(inputs, tf.RaggedTensor):
        if weights.ragged_rank != inputs.ragged_rank:
            raise _wrong_weights(feature, inputs, weights)
        values, pairs = weights.flat_values, list(_splits_of(weights, inputs))
    else:
        values = weights = tf.convert_to_tensor(weights)
        if not weights.shape.is_compatible_with(inputs.shape):
            raise _wrong_weights(feature, inputs, weights)
        pairs = [(tf.shape(weights), tf.shape(inputs))]
    is_double = not feature.is_of_table and feature.table.dtype.base_dtype == tf.float64
    flat = tf.reshape(tf.cast(values, tf.float64 if is_double else tf.float32), [-1])
    fit = tf.equal(tf.size(flat, out_type=tf.int64), num_ids)
    for of_weights, of_inputs in pairs:
        fit = tf.logical_and(fit, _are_equal(of_weights, of_inputs))
    return _Weights(_of_size(flat, num_ids), fit)


def _splits_of(weights: tf.RaggedTensor, inputs: tf.RaggedTensor) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """The row splits of both, level by level."""
    for of_weights, of_inputs in zip(weights.nested_row_splits, inputs.nested_row_splits, strict=True):
        is_same = of_weights is of_inputs or of_weights.dtype == of_inputs.dtype
        yield (of_weights, of_inputs) if is_same else (tf.cast(of_weights, tf.int64), tf.cast(of_inputs, tf.int64))


def _wrong_weights(feature: Feature, inputs: Any, weights: Any) -> ValueError:
    ids, called = feature.ids_called, feature.weights_called
    where = "" if ids == "inputs" else f", for {feature.source}"
    return ValueError(
        f"`{called}` must have the form of `{ids}`{where}. Received: {ids} {describe(inputs)}, "
        f"{called} {describe(weights)}."
    )


def _are_equal(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Whether two tensors of the same rank have the same shape and values; raises for none."""
    if a is b or not a.shape.is_compatible_with(b.shape):
        return tf.constant(a is b)
    have_one_shape = tf.reduce_all(tf.equal(tf.shape(a), tf.shape(b)))
    return tf.cond(have_one_shape, lambda: tf.reduce_all(tf.equal(a, b)), lambda: tf.constant(False))


def _of_size(values: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`values` [n], cut off or filled up where a report will stop the lookup anyhow."""
    missing = tf.maximum(size - tf.size(values, out_type=tf.int64), 0)
    return tf.concat([values, tf.zeros([missing], values.dtype)], 0)[:size]


def _sparse_rows(sparse: tf.SparseTensor, rank: int | None, slot_num: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The number of segments, and of features per sample."""
    dense_shape = sparse.dense_shape
    of_matrix = (dense_shape[0], tf.constant(slot_num, tf.int64))
    if rank == 2:
        return of_matrix
    of_cube = (dense_shape[0] * slot_num, dense_shape[1])
    if rank == 3:
        return of_cube
    is_cube = tf.equal(tf.size(dense_shape), 3)  # a placeholder: known when it runs
    return tuple(tf.where(is_cube, c, m) for c, m in zip(of_cube, of_matrix, strict=True))


def _from_sparse(feature: Feature, sparse: tf.SparseTensor, weights: tf.Tensor | None) -> Csr:
    slot_num = feature.slot_num
    # How many sizes there are may be known where they are not; of what Python functions give, not even that.
    rank = sparse.shape.rank if sparse.shape.rank is not None else (sizes(sparse.dense_shape) or [None])[0]
    if rank not in (2, 3, None):
        raise _error(sparse, feature)
    num_rows, num_features = _sparse_rows(sparse, rank, slot_num)
    is_single = weights is not None and weights.dtype == tf.float32
    given = weights if is_single else tf.zeros([0], tf.float32)
    splits, keys, given, order = _ops.lib().sok_sparse_to_csr(
        sparse.indices,
        _keys_of(sparse.values, feature),
        given,
        num_rows,
        slot_num=slot_num,
        wants_order=weights is not None,
    )
    if weights is not None and not is_single:
        given = tf.gather(weights, order)
    if rank != 3:
        splits = _check_whole(splits, num_rows, slot_num)
    if rank != 2:
        splits = _check_slot_num(splits, num_features, slot_num)
    return Csr(keys, splits, None if weights is None else given)


def _from_ragged(feature: Feature, ragged: tf.RaggedTensor, weights: tf.Tensor | None) -> Csr:
    slot_num = feature.slot_num
    inner_rank = ragged.flat_values.shape.rank or 1  # unknown for some placeholders
    rank = ragged.ragged_rank + inner_rank
    if rank == 3:
        inner = ragged.values
    elif rank == 2 and ragged.ragged_rank == 1:
        inner = ragged
    else:
        raise _error(ragged, feature)
    if isinstance(inner, tf.RaggedTensor):
        keys, splits = inner.values, tf.cast(inner.row_splits, tf.int64)
    else:  # uniform inside: [batch, (slot_num), n] holds its values as [batch * slot_num, n]
        shape = tf.shape(inner, out_type=tf.int64)
        keys, splits = tf.reshape(inner, [-1]), tf.range(shape[0] + 1) * shape[1]
    if rank == 2:
        splits = _check_whole(splits, tf.cast(ragged.nrows(), tf.int64), slot_num)
    elif tf.get_static_value(ragged.uniform_row_length) != slot_num:
        lengths = tf.cast(ragged.row_lengths(), tf.int64)
        (wrong,) = masks.kept(tf.not_equal(lengths, slot_num), lengths)
        came = tf.concat([wrong, [slot_num]], 0)[0]  # the first that is wrong, if any
        splits = _check_slot_num(splits, came, slot_num)
    return Csr(_keys_of(keys, feature), splits, weights, needs_check=rank != 2 or slot_num != 1)


def _from_dense(feature: Feature, dense: tf.Tensor, weights: tf.Tensor | None) -> Csr:
    slot_num = feature.slot_num
    static = sizes(dense) or []
    rank = len(static)
    known = [size for size in static if size is not None]
    fits = (rank == 2 and slot_num == 1) or (rank == 3 and static[1] == slot_num)
    if len(known) == rank and fits and feature.padding_key is None:
        # What follows would do, too: with eight times as many ops, of which a step with thousands of features is made.
        num_keys, length, none = math.prod(known), known[-1], [math.prod(known[:-1]) + 1]
        splits = tf.range(0, num_keys + 1, length, tf.int64) if length else tf.zeros(none, tf.int64)
        return Csr(tf.reshape(dense, [-1]), splits, weights, needs_check=False)
    if rank == 2 and slot_num == 1:
        dense = dense[:, None, :]
    elif rank == 2 and static[1] in (slot_num, None):
        dense = dense[:, :, None]
    elif rank != 3 or static[1] not in (slot_num, None):
        raise _error(dense, feature)
    shape = tf.shape(dense, out_type=tf.int64)
    flat = tf.reshape(dense, [-1])
    if feature.padding_key is None:
        csr = Csr(flat, tf.range(shape[0] * shape[1] + 1) * shape[2], weights, needs_check=False)
    else:
        kept = tf.not_equal(dense, tf.constant(feature.padding_key, feature.key_dtype))
        lengths = tf.reshape(tf.reduce_sum(tf.cast(kept, tf.int64), axis=2), [-1])
        splits = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(lengths)], 0)
        kept = tf.reshape(kept, [-1])
        flat, *given = masks.kept(kept, flat, *([] if weights is None else [weights]))
        csr = Csr(flat, splits, given[0] if given else None, needs_check=False)
    if tf.compat.dimension_value(dense.shape[1]) == slot_num:
        return csr
    return Csr(csr.keys, _check_slot_num(csr.row_splits, shape[1], slot_num), csr.weights)


def to_csr(feature: Feature) -> Csr:
    """Ids in any of the accepted forms as segments: segment b * slot_num + f holds feature f of sample b.

    Ids, of F = `slot_num` features per sample: SparseTensor with dense_shape [B * F, n] (SOK's form) or [B, F, n], its
    indices in any order; RaggedTensor [B, F, None] or [B * F, None]; dense [B, F, n], [B, F] with one id each or, with
    F = 1, [B, n]. Integers that fit into the table's key dtype are cast. Weights are one per id, in the form of the ids
    and at the same places (indices, row splits). With the combiner `ROWS` ids are dense, of any shape, and stay so.

    Raises:
        ValueError, TypeError: the form, rank or dtype is not one of these.

    Example:
        >>> from sok.table.table import EmbeddingVariable
        >>> table = EmbeddingVariable(1, 10, name="to_csr")
        >>> csr = to_csr(Feature(table, tf.constant([[3, 0], [0, 5]]), "sum", slot_num=2, padding_key=0))
        >>> csr.keys.numpy().tolist(), csr.row_splits.numpy().tolist()
        ([3, 5], [0, 1, 1, 1, 2])
    """
    ids = feature.ids
    if isinstance(ids, Csr):
        return _as_they_are(feature, ids)
    if feature.combiner == ROWS:
        if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
            raise TypeError(
                f"`{feature.ids_called}` must be dense. Received: a {type(ids).__name__}. "
                "Look it up with sok.group_embedding_lookup_sparse(..., is_sequence=True)."
            )
        return Csr(_keys_of(ids, feature))
    given = None
    if isinstance(ids, tf.SparseTensor):
        given = _weights_of(feature, ids, tf.size(ids.values, out_type=tf.int64))
        csr = _from_sparse(feature, ids, given and given.flat)
    elif isinstance(ids, tf.RaggedTensor):
        given = _weights_of(feature, ids, tf.size(ids.flat_values, out_type=tf.int64))
        csr = _from_ragged(feature, ids, given and given.flat)
    else:
        dense = _keys_of(ids, feature)
        given = _weights_of(feature, dense, tf.size(dense, out_type=tf.int64))
        csr = _from_dense(feature, dense, given and given.flat)
    if given is not None:
        splits = _check(csr.row_splits, "weights_differ", given.fit, tf.zeros([], tf.int64))
        csr = dataclasses.replace(csr, row_splits=splits, needs_check=True)
    if feature.seen is not None:
        feature.seen(csr.keys, csr.row_splits)
    if not feature.distinct_slots:
        return csr
    keys, splits = slot_keys(csr.keys, csr.row_splits, csr.row_splits, feature.slot_num)
    return dataclasses.replace(csr, keys=keys, row_splits=splits, needs_check=True)


def slot_keys(keys: tf.Tensor, row_splits: tf.Tensor, report: tf.Tensor, slot_num: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Keys [N] of which each stands for an id and the slot of its segment, and `report`, or one of an id too large."""
    keys, ok, detail = _ops.lib().sok_slot_keys(keys, row_splits, slot_num=slot_num)
    return keys, _check(report, "slot_key_too_large", ok, detail)


def _as_they_are(feature: Feature, ids: Csr) -> Csr:
    splits = None if ids.row_splits is None else tf.convert_to_tensor(ids.row_splits, tf.int64)
    weights = None if ids.weights is None else tf.convert_to_tensor(ids.weights, tf.float32)
    csr = Csr(_keys_of(ids.keys, feature), splits, weights)
    for what in ("keys", "row_splits", "weights"):
        tensor = getattr(csr, what)
        if tensor is not None and tensor.shape.rank not in (1, None) and (what != "keys" or feature.combiner != ROWS):
            raise ValueError(f"{feature.source}: `{what}` must have rank 1. Received: shape {tensor.shape}.")
    return csr


def to_dense(inputs: Ids, key_dtype: tf.DType, table: str) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Ids of a fixed number per feature as a dense tensor, and None or row splits that are empty or a report."""
    empty = tf.zeros([0], tf.int64)
    if isinstance(inputs, tf.SparseTensor):
        indices, shape = inputs.indices, inputs.dense_shape
        values = as_keys(inputs.values, key_dtype, table)
        size = tf.size(values, out_type=tf.int64)
        # Sizes that nobody has memory for would be raised by this worker alone. Floats do not overflow.
        places, ids = tf.reduce_prod(tf.cast(shape, tf.float64)), tf.cast(size, tf.float64)
        fits = tf.reduce_all(tf.logical_and(shape >= 0, shape < 2**31)) & (places <= 2 * ids + 2**20)
        place = tf.reduce_sum(indices * tf.math.cumprod(shape, exclusive=True, reverse=True), 1)
        order = tf.argsort(place, stable=True)
        is_inside = tf.reduce_all(tf.logical_and(indices >= 0, indices < shape))
        is_full = (places == ids) & is_inside & _are_equal(tf.gather(place, order), tf.range(size))
        dense = _in_shape(tf.gather(values, order), shape, fits)
        if not tf.executing_eagerly() and (static := sizes(inputs)) is not None:
            dense.set_shape([None if n is None or not 0 <= n < 2**31 else n for n in static])
        return dense, _check(empty, "uneven", is_full, size)
    if isinstance(inputs, tf.RaggedTensor):
        # Not to_tensor(), which raises for splits that make no sense.
        shape, is_full = inputs.bounding_shape(out_type=tf.int64), tf.constant(True)
        inside = [tf.size(s, out_type=tf.int64) - 1 for s in inputs.nested_row_splits[1:]]
        inside.append(tf.shape(inputs.flat_values, out_type=tf.int64)[0])
        for level, (splits, num_rows) in enumerate(zip(inputs.nested_row_splits, inside, strict=True)):
            length = tf.minimum(shape[level + 1], num_rows)  # no more: products are not to overflow
            even = tf.range(tf.size(splits, out_type=tf.int64)) * length
            is_full &= _are_equal(tf.cast(splits, tf.int64), even) & _are_equal(even[-1:], num_rows[tf.newaxis])
        flat = tf.reshape(as_keys(inputs.flat_values, key_dtype, table), [-1])
        dense = _in_shape(flat, shape, is_full)
        if not tf.executing_eagerly():
            dense.set_shape(inputs.shape)
        return dense, _check(empty, "uneven", is_full, tf.zeros([], tf.int64))
    return as_keys(inputs, key_dtype, table), None


def _in_shape(flat: tf.Tensor, shape: tf.Tensor, fits: tf.Tensor) -> tf.Tensor:
    """`flat` in that shape; where it does not fit, no rows."""
    nothing = tf.concat([tf.zeros([1], tf.int64), tf.clip_by_value(shape[1:], tf.constant(0, tf.int64), 2**20)], 0)
    shape = tf.where(fits, shape, nothing)
    return tf.reshape(_of_size(flat, tf.reduce_prod(shape)), shape)


def check_sizes(splits: tf.Tensor | None, dense: tf.Tensor, wanted: list[int]) -> tf.Tensor:
    """`splits`, or a report if dense [B, ...] has other sizes than `wanted` after the first."""
    came = tf.shape(dense, out_type=tf.int64)[1:]
    splits = tf.zeros([0], tf.int64) if splits is None else splits
    return _check(splits, "uneven", tf.reduce_all(tf.equal(came, wanted)), came[0])


def static_batch(inputs: Ids, slot_num: int) -> int | None:
    """How many samples `inputs` holds, if that is known before it runs."""
    static = sizes(inputs) if isinstance(inputs, Shaped) else None
    # A dense_shape may say anything. TensorFlow ends the process where sizes of a shape overflow.
    if not static or static[0] is None or not 0 <= static[0] < 2**31:
        return None
    is_flat = len(static) == 2 and isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor))
    return static[0] // slot_num if is_flat else static[0]
