"""What a person passes to a layer, as keys and row splits.

Sizes that are only known when the step runs are not checked here by raising: a rank that stops before the exchange
leaves its peers waiting. They become a report in place of the row splits, which the lookup raises on every rank.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok import _ops
from sok.keys import as_keys
from sok.lookup import Csr


def describe(inputs: Any) -> str:
    """A short text that says what came, for messages."""
    if isinstance(inputs, tf.RaggedTensor):
        return f"a RaggedTensor of shape {inputs.shape} with ragged_rank {inputs.ragged_rank}, {inputs.dtype.name}"
    if isinstance(inputs, tf.SparseTensor):
        return f"a SparseTensor of shape {inputs.shape}, {inputs.dtype.name}"
    if tf.is_tensor(inputs) or hasattr(inputs, "shape"):
        return f"a dense tensor of shape {tuple(sizes(inputs) or ())}, {getattr(inputs.dtype, 'name', inputs.dtype)}"
    return repr(inputs)


def sizes(tensor: Any) -> list[int | None] | None:
    """The static shape as a list of integers, which shapes do not hold with v2 behaviour off; None: rank unknown."""
    shape = tf.TensorShape(tensor.shape)
    return None if shape.rank is None else shape.as_list()


def _error(inputs: Any, slot_num: int) -> ValueError:
    accepted = (
        f"a SparseTensor with dense_shape [batch * {slot_num}, max_nnz] or [batch, {slot_num}, n], a RaggedTensor "
        f"[batch, {slot_num}, None] or [batch * {slot_num}, None], or a dense tensor [batch, {slot_num}, n] or "
    )
    accepted += "[batch, n]" if slot_num == 1 else f"[batch, {slot_num}] with one id each"
    return ValueError(f"`inputs` must be {accepted} (slot_num = {slot_num}). Received: {describe(inputs)}.")


def _check(splits: tf.Tensor, problem: str, ok: tf.Tensor, detail: tf.Tensor) -> tf.Tensor:
    """`splits`, or a report of the problem if not `ok`."""
    return _ops.lib().sok_check_input(splits, ok, detail, problem=problem)


def _check_slot_num(splits: tf.Tensor, came: tf.Tensor, slot_num: int) -> tf.Tensor:
    return _check(splits, "wrong_slot_num", tf.equal(came, slot_num), came)


def _check_whole(splits: tf.Tensor, num_rows: tf.Tensor, slot_num: int) -> tf.Tensor:
    if slot_num == 1:
        return splits
    return _check(splits, "rows_not_whole", tf.equal(num_rows % slot_num, 0), num_rows)


def _flat_weights(weights: Any, inputs: Any) -> tf.Tensor:
    """The weights [N] of the ids of `inputs`, in the order in which they lie there."""
    for form, values in ((tf.SparseTensor, "values"), (tf.RaggedTensor, "flat_values")):
        if isinstance(inputs, form) != isinstance(weights, form):
            raise ValueError(
                f"`weights` must have the form of `inputs`. Received: inputs {describe(inputs)}, "
                f"weights {describe(weights)}."
            )
        if isinstance(inputs, form):
            weights = getattr(weights, values)
            break
    return tf.reshape(tf.cast(weights, tf.float32), [-1])


def _sparse_rows(sparse: tf.SparseTensor, rank: int | None, slot_num: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The segment of each id [N], the number of segments, and of features per sample."""
    indices, dense_shape = sparse.indices, sparse.dense_shape
    of_matrix = (indices[:, 0], dense_shape[0], tf.constant(slot_num, tf.int64))
    if rank == 2:
        return of_matrix
    # A feature beyond slot_num would land in the next sample. No segment is -1: what reads it reports it.
    in_sample = tf.logical_and(indices[:, 1] >= 0, indices[:, 1] < slot_num)
    row = tf.where(in_sample, indices[:, 0] * slot_num + indices[:, 1], tf.constant(-1, tf.int64))
    of_cube = (row, dense_shape[0] * slot_num, dense_shape[1])
    if rank == 3:
        return of_cube
    is_cube = tf.equal(tf.size(dense_shape), 3)  # a placeholder: known when it runs
    return tuple(tf.where(is_cube, c, m) for c, m in zip(of_cube, of_matrix, strict=True))


def _from_sparse(sparse: tf.SparseTensor, weights: tf.Tensor | None, slot_num: int, keys: tf.Tensor) -> Csr:
    rank = sparse.shape.rank if sparse.shape.rank is not None else sizes(sparse.dense_shape)[0]
    if rank not in (2, 3, None):
        raise _error(sparse, slot_num)
    row, num_rows, num_features = _sparse_rows(sparse, rank, slot_num)
    given = tf.zeros([0], tf.float32) if weights is None else weights
    splits, keys, given, _ = _ops.lib().sok_sparse_to_csr(row, keys, given, num_rows)
    if rank != 3:
        splits = _check_whole(splits, num_rows, slot_num)
    if rank != 2:
        splits = _check_slot_num(splits, num_features, slot_num)
    return Csr(keys, splits, None if weights is None else given)


def _from_ragged(ragged: tf.RaggedTensor, weights: tf.Tensor | None, slot_num: int, key_dtype: Any, table: str) -> Csr:
    inner_rank = ragged.flat_values.shape.rank or 1  # unknown for some placeholders
    rank = ragged.ragged_rank + inner_rank
    if rank == 3:
        inner = ragged.values
    elif rank == 2 and ragged.ragged_rank == 1:
        inner = ragged
    else:
        raise _error(ragged, slot_num)
    if isinstance(inner, tf.RaggedTensor):
        keys, splits = inner.values, tf.cast(inner.row_splits, tf.int64)
    else:  # uniform inside: [batch, (slot_num), n] holds its values as [batch * slot_num, n]
        shape = tf.shape(inner, out_type=tf.int64)
        keys, splits = tf.reshape(inner, [-1]), tf.range(shape[0] + 1) * shape[1]
    if rank == 2:
        splits = _check_whole(splits, tf.cast(ragged.nrows(), tf.int64), slot_num)
    elif tf.get_static_value(ragged.uniform_row_length) != slot_num:
        lengths = tf.cast(ragged.row_lengths(), tf.int64)
        wrong = tf.boolean_mask(lengths, tf.not_equal(lengths, slot_num))
        came = tf.concat([wrong, [slot_num]], 0)[0]  # the first that is wrong, if any
        splits = _check_slot_num(splits, came, slot_num)
    return Csr(as_keys(keys, key_dtype, table), splits, weights)


def _from_dense(
    dense: tf.Tensor, weights: tf.Tensor | None, padding_key: int | None, slot_num: int, key_dtype: tf.DType
) -> Csr:
    static = sizes(dense)
    rank = None if static is None else len(static)
    if rank == 2 and slot_num == 1:
        dense = dense[:, None, :]
    elif rank == 2 and static[1] in (slot_num, None):
        dense = dense[:, :, None]
    elif rank != 3 or static[1] not in (slot_num, None):
        raise _error(dense, slot_num)
    shape = tf.shape(dense, out_type=tf.int64)
    flat = tf.reshape(dense, [-1])
    if padding_key is None:
        csr = Csr(flat, tf.range(shape[0] * shape[1] + 1) * shape[2], weights)
    else:
        kept = tf.not_equal(dense, tf.constant(padding_key, key_dtype))
        lengths = tf.reshape(tf.reduce_sum(tf.cast(kept, tf.int64), axis=2), [-1])
        splits = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(lengths)], 0)
        kept = tf.reshape(kept, [-1])
        csr = Csr(tf.boolean_mask(flat, kept), splits, None if weights is None else tf.boolean_mask(weights, kept))
    if sizes(dense)[1] == slot_num:
        return csr
    return Csr(csr.keys, _check_slot_num(csr.row_splits, shape[1], slot_num), csr.weights)


def to_csr(
    inputs: Any, slot_num: int, key_dtype: tf.DType, table: str, weights: Any = None, padding_key: int | None = None
) -> Csr:
    """Ids in any of the accepted forms as segments: segment b * slot_num + f holds feature f of sample b.

    Args:
        inputs: SparseTensor with dense_shape [B * slot_num, n] (SOK's form) or [B, slot_num, n], its indices in any
            order; RaggedTensor [B, slot_num, None] or [B * slot_num, None]; dense [B, slot_num, n], [B, slot_num] with
            one id each or, with slot_num 1, [B, n].
        slot_num: features F per sample.
        key_dtype: of the table; integers that fit into it are cast.
        table: name, for messages.
        weights: one weight per id, in the form and order of `inputs`.
        padding_key: in dense inputs, ids equal to it are left out. None: none is.

    Raises:
        ValueError: the form, rank or dtype is not one of these.

    Example:
        >>> csr = to_csr(tf.constant([[3, 0], [0, 5]]), 2, tf.int64, "doc", padding_key=0)
        >>> csr.keys.numpy().tolist(), csr.row_splits.numpy().tolist()
        ([3, 5], [0, 1, 1, 1, 2])
    """
    if isinstance(inputs, tf.SparseTensor):
        flat = None if weights is None else _flat_weights(weights, inputs)
        return _from_sparse(inputs, flat, slot_num, as_keys(inputs.values, key_dtype, table))
    if isinstance(inputs, tf.RaggedTensor):
        flat = None if weights is None else _flat_weights(weights, inputs)
        return _from_ragged(inputs, flat, slot_num, key_dtype, table)
    dense = as_keys(inputs, key_dtype, table)
    flat = None if weights is None else _flat_weights(weights, dense)
    return _from_dense(dense, flat, padding_key, slot_num, key_dtype)


def to_dense(inputs: Any, key_dtype: tf.DType, table: str) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Ids of a fixed number per feature as a dense tensor, and None or row splits that are empty or a report."""
    empty = tf.zeros([0], tf.int64)
    if isinstance(inputs, tf.SparseTensor):
        size = tf.reduce_prod(inputs.dense_shape)
        values = as_keys(tf.sparse.reorder(inputs).values, key_dtype, table)
        given = tf.size(values, out_type=tf.int64)
        # With gaps there are fewer values than places. Fill up: the report stops the lookup anyway.
        values = tf.concat([values, tf.zeros([tf.maximum(size - given, 0)], key_dtype)], 0)[:size]
        return tf.reshape(values, inputs.dense_shape), _check(empty, "uneven", tf.equal(given, size), size)
    if isinstance(inputs, tf.RaggedTensor):
        dense = as_keys(inputs.to_tensor(), key_dtype, table)
        is_full = tf.equal(tf.size(inputs.flat_values), tf.size(dense))
        return dense, _check(empty, "uneven", is_full, tf.zeros([], tf.int64))
    return as_keys(inputs, key_dtype, table), None


def check_sizes(splits: tf.Tensor | None, dense: tf.Tensor, wanted: list[int]) -> tf.Tensor:
    """`splits`, or a report if dense [B, ...] has other sizes than `wanted` after the first."""
    came = tf.shape(dense, out_type=tf.int64)[1:]
    splits = tf.zeros([0], tf.int64) if splits is None else splits
    return _check(splits, "uneven", tf.reduce_all(tf.equal(came, wanted)), came[0])


def static_batch(inputs: Any, slot_num: int) -> int | None:
    """How many samples `inputs` holds, if that is known before it runs."""
    static = sizes(inputs)
    if not static or static[0] is None:
        return None
    is_flat = len(static) == 2 and isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor))
    return static[0] // slot_num if is_flat else static[0]
