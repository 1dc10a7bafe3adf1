"""What a person passes to a layer, as keys and row splits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok import _ops
from sok.lookup import Csr
from sok.table import as_keys


def describe(inputs: Any) -> str:
    """A short text that says what came, for messages."""
    if isinstance(inputs, tf.RaggedTensor):
        return f"RaggedTensor of shape {inputs.shape}, {inputs.dtype.name}"
    if isinstance(inputs, tf.SparseTensor):
        return f"SparseTensor of rank {inputs.shape.rank}, {inputs.dtype.name}"
    return f"{type(inputs).__name__} of shape {getattr(inputs, 'shape', None)}"


def _accepted(slot_num: int) -> str:
    forms = (
        f"a SparseTensor with dense_shape [batch * {slot_num}, max_nnz] or [batch, {slot_num}, n], a RaggedTensor "
        f"[batch, {slot_num}, None] or [batch * {slot_num}, None], or a dense tensor [batch, {slot_num}, n]"
    )
    return forms + (" or [batch, n]" if slot_num == 1 else f" or [batch, {slot_num}] with one id each")


def _error(inputs: Any, slot_num: int) -> ValueError:
    return ValueError(f"`inputs` must be {_accepted(slot_num)} (slot_num = {slot_num}). Received: {describe(inputs)}.")


def _from_sparse(sparse: tf.SparseTensor, weights: Any, slot_num: int, key_dtype: tf.DType, table: str) -> Csr:
    rank = sparse.shape.rank if sparse.shape.rank is not None else sparse.dense_shape.shape[0]
    if rank == 2:
        row, num_rows = sparse.indices[:, 0], sparse.dense_shape[0]
        problem = ("rows_not_whole", num_rows % slot_num == 0, num_rows)
    elif rank == 3:
        row = sparse.indices[:, 0] * slot_num + sparse.indices[:, 1]
        num_rows = sparse.dense_shape[0] * slot_num
        problem = ("wrong_slot_num", tf.equal(sparse.dense_shape[1], slot_num), sparse.dense_shape[1])
    else:
        raise _error(sparse, slot_num)
    if weights is None:
        values = tf.zeros([0], tf.float32)
    else:
        values = weights.values if isinstance(weights, tf.SparseTensor) else weights
        values = tf.cast(values, tf.float32)
    keys = as_keys(sparse.values, key_dtype, table)
    splits, keys, values, _ = _ops.lib().sok_sparse_to_csr(row, keys, values, num_rows)
    return Csr(keys, _check(splits, *problem), None if weights is None else values)


def _from_ragged(ragged: tf.RaggedTensor, weights: Any, slot_num: int, key_dtype: tf.DType, table: str) -> Csr:
    rank = ragged.shape.rank
    if rank == 3:
        lengths = tf.cast(ragged.row_lengths(), tf.int64)
        fits = tf.equal(lengths, slot_num)
        # The first sample that does not fit says what came; 0 if there is none.
        came = tf.reduce_max(tf.where(fits, tf.zeros_like(lengths), lengths))
        problem = ("wrong_slot_num", tf.reduce_all(fits), came)
        inner = ragged.values
    elif rank == 2 and ragged.ragged_rank == 1:
        rows = tf.cast(ragged.nrows(), tf.int64)
        problem = ("rows_not_whole", rows % slot_num == 0, rows)
        inner = ragged
    else:
        raise _error(ragged, slot_num)
    if isinstance(inner, tf.RaggedTensor):
        keys, splits = inner.values, tf.cast(inner.row_splits, tf.int64)
        flat_weights = None if weights is None else tf.cast(getattr(weights, "flat_values", weights), tf.float32)
    else:  # [batch, (slots), n]: uniform inside, its values are [batch * slots, n]
        shape = tf.shape(inner, out_type=tf.int64)
        keys, splits = tf.reshape(inner, [-1]), tf.range(shape[0] + 1) * shape[1]
        flat_weights = None if weights is None else tf.reshape(tf.cast(getattr(weights, "flat_values", weights), tf.float32), [-1])
    return Csr(as_keys(keys, key_dtype, table), _check(splits, *problem), flat_weights)


def _check(splits: tf.Tensor, problem: str, ok: tf.Tensor, detail: tf.Tensor) -> tf.Tensor:
    """`splits`, or a report of the problem in their place: raising here would leave the other workers waiting."""
    return _ops.lib().sok_check_input(splits, ok, detail, problem=problem)


def _from_dense(dense: tf.Tensor, padding_key: Any, slot_num: int, key_dtype: tf.DType, table: str) -> Csr:
    rank = dense.shape.rank
    if rank == 3 and dense.shape[1] in (slot_num, None):
        pass
    elif rank == 2 and dense.shape[1] == slot_num and slot_num != 1:
        dense = dense[:, :, None]
    elif rank == 2 and slot_num == 1:
        dense = dense[:, None, :]
    else:
        raise _error(dense, slot_num)
    dense = as_keys(dense, key_dtype, table)
    shape = tf.shape(dense, out_type=tf.int64)
    segments, length = shape[0] * slot_num, shape[2]
    keys = tf.reshape(dense, [segments, length])
    if padding_key is None:
        return Csr(tf.reshape(keys, [-1]), tf.range(segments + 1) * length)
    kept = tf.not_equal(keys, tf.constant(padding_key, key_dtype))
    lengths = tf.reduce_sum(tf.cast(kept, tf.int64), axis=1)
    return Csr(tf.boolean_mask(keys, kept), tf.concat([tf.zeros([1], tf.int64), tf.cumsum(lengths)], 0))


def to_dense(inputs: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids of a fixed number per feature as a dense tensor, and row splits that are empty or report that they are not."""
    splits = tf.zeros([0], tf.int64)
    if isinstance(inputs, tf.SparseTensor):
        size = tf.reduce_prod(inputs.dense_shape)
        full = tf.equal(tf.size(inputs.values, out_type=tf.int64), size)
        # With gaps there are fewer values than places: fill up, the report stops the lookup anyway.
        values = tf.sparse.reorder(inputs).values
        padded = tf.concat([values, tf.zeros([tf.maximum(size - tf.size(values, out_type=tf.int64), 0)], values.dtype)], 0)
        return tf.reshape(padded[:size], inputs.dense_shape), _check(splits, "uneven", full, size)
    if isinstance(inputs, tf.RaggedTensor):
        dense = inputs.to_tensor()
        full = tf.equal(tf.size(inputs.flat_values), tf.size(dense))
        return dense, _check(splits, "uneven", full, tf.constant(0, tf.int64))
    return inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs), splits


def check_sizes(splits: tf.Tensor, dense: tf.Tensor, wanted: list[int]) -> tf.Tensor:
    """`splits`, or a report if dense [B, ...] has other sizes than `wanted` after the first."""
    sizes = tf.shape(dense, out_type=tf.int64)[1:]
    return _check(splits, "uneven", tf.reduce_all(tf.equal(sizes, wanted)), sizes[0])


def to_csr(
    inputs: Any, slot_num: int, key_dtype: tf.DType, table: str, weights: Any = None, padding_key: Any = None
) -> Csr:
    """Ids in any of the accepted forms as segments: segment b * slot_num + f holds feature f of sample b.

    Args:
        inputs: see the message of the error below.
        slot_num: features F per sample.
        key_dtype: of the table; narrower integers are widened.
        table: name, for messages.
        weights: one weight per id, in the form and order of `inputs` (not for dense inputs).
        padding_key: in dense inputs, ids equal to it are left out.

    Raises:
        ValueError: the form, rank or dtype is not one of these. Sizes that are only known when it runs become a report
            in place of the row splits, which the lookup raises on every worker.
    """
    if isinstance(inputs, tf.SparseTensor):
        return _from_sparse(inputs, weights, slot_num, key_dtype, table)
    if isinstance(inputs, tf.RaggedTensor):
        return _from_ragged(inputs, weights, slot_num, key_dtype, table)
    if weights is not None:
        raise ValueError("`weights` goes with a SparseTensor or RaggedTensor of ids.")
    dense = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
    return _from_dense(dense, padding_key, slot_num, key_dtype, table)
