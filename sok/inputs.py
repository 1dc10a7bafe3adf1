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
        whole = tf.debugging.assert_equal(
            num_rows % slot_num,
            tf.constant(0, tf.int64),
            message=f"`inputs`: the rows of a rank-2 SparseTensor must be batch * slot_num (slot_num = {slot_num})",
        )
    elif rank == 3:
        row = sparse.indices[:, 0] * slot_num + sparse.indices[:, 1]
        num_rows = sparse.dense_shape[0] * slot_num
        whole = tf.debugging.assert_equal(
            sparse.dense_shape[1],
            tf.constant(slot_num, tf.int64),
            message="`inputs`: the second dimension of a rank-3 SparseTensor must be slot_num",
        )
    else:
        raise _error(sparse, slot_num)
    if weights is None:
        values = tf.zeros([0], tf.float32)
    else:
        values = weights.values if isinstance(weights, tf.SparseTensor) else weights
        values = tf.cast(values, tf.float32)
    with tf.control_dependencies([] if whole is None else [whole]):
        keys = as_keys(sparse.values, key_dtype, table)
        splits, keys, values, _ = _ops.lib().sok_sparse_to_csr(row, keys, values, num_rows)
    return Csr(keys, splits, None if weights is None else values)


def _from_ragged(ragged: tf.RaggedTensor, weights: Any, slot_num: int, key_dtype: tf.DType, table: str) -> Csr:
    if ragged.ragged_rank == 1 and ragged.shape.rank == 3:
        # [batch, (slots), n]: the slots of all samples, each with n ids
        _check_lengths(ragged, slot_num)
        return _from_dense(tf.reshape(ragged.values, [-1, slot_num, ragged.values.shape[-1]]), None, slot_num, key_dtype, table)
    flat_weights = None if weights is None else getattr(weights, "flat_values", weights)
    if ragged.ragged_rank == 2 and ragged.shape.rank == 3:
        check = _check_lengths(ragged, slot_num)
        ragged = ragged.values
    elif ragged.ragged_rank == 1 and ragged.shape.rank == 2:
        check = tf.debugging.assert_equal(
            ragged.nrows() % slot_num,
            tf.zeros([], ragged.row_splits.dtype),
            message=f"`inputs`: the rows of a rank-2 RaggedTensor must be batch * slot_num (slot_num = {slot_num})",
        )
    else:
        raise _error(ragged, slot_num)
    with tf.control_dependencies([] if check is None else [check]):
        keys = as_keys(tf.identity(ragged.values), key_dtype, table)
    return Csr(keys, tf.cast(ragged.row_splits, tf.int64), None if weights is None else tf.cast(flat_weights, tf.float32))


def _check_lengths(ragged: tf.RaggedTensor, slot_num: int) -> Any:
    return tf.debugging.assert_equal(
        ragged.row_lengths(),
        tf.constant(slot_num, ragged.row_splits.dtype),
        message="`inputs`: every sample of a RaggedTensor must have slot_num rows",
    )


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
        ValueError: the form, rank or dtype is not one of these.
        tf.errors.InvalidArgumentError: sizes that are only known when it runs do not fit.
    """
    if isinstance(inputs, tf.SparseTensor):
        return _from_sparse(inputs, weights, slot_num, key_dtype, table)
    if isinstance(inputs, tf.RaggedTensor):
        return _from_ragged(inputs, weights, slot_num, key_dtype, table)
    if weights is not None:
        raise ValueError("`weights` goes with a SparseTensor or RaggedTensor of ids.")
    dense = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
    return _from_dense(dense, padding_key, slot_num, key_dtype, table)
