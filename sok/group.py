"""Many tables, one lookup."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok import _ops, exchange, lookup
from sok.inputs import to_csr
from sok.keys import as_keys
from sok.lookup import Csr, Feature
from sok.table import EmbeddingVariable, is_embedding_variable

_COMBINERS = ("sum", "mean", "sqrtn")


@dataclasses.dataclass(frozen=True)
class Request:
    """One of the lookups of a group."""

    table: EmbeddingVariable
    ids: Any
    weights: Any = None
    combiner: str = exchange.ROWS  # or 'sum', 'mean', 'sqrtn'


def group_embedding_lookup_sparse(
    params: Sequence[EmbeddingVariable],
    sp_ids: Sequence[Any],
    combiners: str | Sequence[str] | None = None,
    *,
    partition_strategy: str = "mod",
    sp_weights: Sequence[Any] | None = None,
    is_sequence: bool = False,
    params_num_per_group: int | None = None,
    training: Any = True,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Looks up and pools the ids of many features, each in its own table, in one op.

    Same as `tf.nn.embedding_lookup_sparse` for each of them, but that an empty sample gives zeros, at the end of the
    batch too. Where stock TensorFlow pays for kernels and Python calls per table, this pays once for the group, and all
    processors work on all tables. On several workers the group is one exchange: two collectives forward, one backward.

    Args:
        params: tables of any widths and key dtypes. The same table may come several times.
        sp_ids: for each, integer ids as SparseTensor [batch, n], RaggedTensor [batch, None] (its values are not copied)
            or dense [batch, n].
        combiners: 'sum', 'mean' or 'sqrtn', in any capitalisation; one for all or one each. None: 'mean'.
        partition_strategy: 'mod', and no other: a key belongs to worker key % workers.
        sp_weights: None, or for each feature None or weights in the form of its ids: sum(w e), sum(w e) / sum(w) and
            sum(w e) / sqrt(sum(w^2)).
        is_sequence: whether to give the rows of each sample one after the other, in place of pooling them.
        params_num_per_group: at most so many of the features in one op, or exchange. None: all of them.
        training: whether unseen ids get a row; without, they read as the row they would get.
        name: of the scope of the ops.

    Returns:
        A list of float32 [batch, dim], one per feature. With `is_sequence` [batch, T, dim], where T is the largest
        number of ids that a sample of this feature has, filled up with zeros. Differentiable in the tables and the
        weights.

    Raises:
        TypeError: `params` or `sp_ids` is not a list, or a table is not an EmbeddingVariable.
        ValueError: lists of different lengths, an unknown combiner or strategy, ids of an unknown form, weights for a
            sequence.
        tf.errors.InvalidArgumentError: malformed ids, or an id outside an identity table; on every worker.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. Rows that other tables of the group made for
            this call stay.

    Collective.

    Example:
        >>> import tensorflow as tf
        >>> import sok
        >>> user = sok.EmbeddingVariable(2, 100, name="group_user", initializer="ones")
        >>> item = sok.EmbeddingVariable(3, 100, name="group_item", initializer="ones")
        >>> ids = tf.RaggedTensor.from_row_splits([3, 1, 4, 1, 5, 9, 2, 6], [0, 4, 4, 7, 8, 8])
        >>> outputs = sok.group_embedding_lookup_sparse([user, item], [ids, ids], ["sum", "mean"])
        >>> outputs[0].numpy()[:, 0].tolist(), outputs[1].numpy()[:, 0].tolist()
        ([4.0, 0.0, 3.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0, 0.0])

    Source: `group_embedding_lookup_sparse` of DeepRec, whose weights count by another rule, if at all.
    """
    params = _as_list("params", params)
    sp_ids = _one_each("sp_ids", sp_ids, len(params))
    combiners = _check_combiners(combiners, len(params))
    weights = [None] * len(params) if sp_weights is None else _one_each("sp_weights", sp_weights, len(params))
    _check_strategy(partition_strategy)
    _check_tables(params)
    if is_sequence and any(w is not None for w in weights):
        raise ValueError("`sp_weights` must be None with is_sequence=True: rows that are not pooled have no weights.")
    if is_sequence:
        combiners = [exchange.ROWS] * len(params)
    requests = [Request(*request) for request in zip(params, sp_ids, weights, combiners, strict=True)]
    with tf.name_scope(name or "group_embedding_lookup_sparse"):
        chunks = _chunks(requests, params_num_per_group)
        return [output for chunk in chunks for output in lookup_sparse(chunk, training)]


def group_embedding_lookup(
    params: Sequence[EmbeddingVariable],
    ids: Sequence[Any],
    partition_strategy: str = "mod",
    name: str | None = None,
    *,
    training: Any = True,
) -> list[tf.Tensor]:
    """Looks up the rows of many features, each in its own table, in one op.

    Same as `tf.nn.embedding_lookup` for each of them. On several workers the group is one exchange: two collectives
    forward, one backward.

    Args:
        params: tables of any widths and key dtypes. The same table may come several times.
        ids: for each, integer ids of any shape.
        partition_strategy: 'mod', and no other: a key belongs to worker key % workers.
        name: of the scope of the ops.
        training: whether unseen ids get a row; without, they read as the row they would get.

    Returns:
        A list of float32 [*shape of the ids, dim], one per feature. Differentiable in the tables.

    Raises:
        TypeError: `params` or `ids` is not a list, or a table is not an EmbeddingVariable.
        ValueError: lists of different lengths, an unknown strategy, ids that are no integers.
        tf.errors.InvalidArgumentError: an id outside an identity table; on every worker.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. Rows that other tables of the group made for
            this call stay.

    Collective.

    Example:
        >>> import sok
        >>> user = sok.EmbeddingVariable(2, 100, name="rows_user", initializer="ones")
        >>> item = sok.EmbeddingVariable(3, 100, name="rows_item", initializer="zeros")
        >>> [rows.shape.as_list() for rows in sok.group_embedding_lookup([user, item], [[7, 8], [[9]]])]
        [[2, 2], [1, 1, 3]]

    Source: `group_embedding_lookup` of DeepRec, which flattens the ids.
    """
    params = _as_list("params", params)
    ids = _one_each("ids", ids, len(params))
    _check_strategy(partition_strategy)
    _check_tables(params)
    if not params:
        return []
    with tf.name_scope(name or "group_embedding_lookup"):
        with exchange.told_to_peers(*params):
            keys = [as_keys(i, table.key_dtype, table.table_name) for table, i in zip(params, ids, strict=True)]
        features = []
        for table, of_table in zip(params, keys, strict=True):
            flat = tf.reshape(of_table, [-1])
            if table.world_size > 1:
                features.append(Feature(table, Csr(flat, tf.zeros([0], tf.int64)), exchange.ROWS))
            else:
                features.append(_singles(table, flat))
        rows = lookup.lookup_group(features, training)
        return [_in_shape_of(k, r) for k, r in zip(keys, rows, strict=True)]


def lookup_sparse(requests: Sequence[Request], training: Any) -> list[tf.Tensor]:
    """The pooled vectors [batch, dim] or, with the combiner `ROWS`, the padded rows [batch, T, dim] of some features.

    Collective; one exchange.
    """
    if not requests:
        return []
    with exchange.told_to_peers(*(r.table for r in requests)):
        splits, features = zip(*map(_feature, requests), strict=True)
    outputs = lookup.lookup_group(features, training)
    return [
        _padded(output, of_feature) if r.combiner == exchange.ROWS else output
        for r, of_feature, output in zip(requests, splits, outputs, strict=True)
    ]


def _feature(r: Request) -> tuple[tf.Tensor, Feature]:
    """The row splits of a request, and the feature to look up."""
    csr = to_csr(r.ids, 1, r.table.key_dtype, r.table.table_name, r.weights)
    if r.combiner == exchange.ROWS and r.table.world_size == 1:
        # On one worker rows are segments of one key each, so that they too come from the fused op.
        keys = _ops.lib().sok_validate_csr(r.table.handle, csr.keys, csr.row_splits)
        return csr.row_splits, _singles(r.table, keys)
    # 64-bit splits of a RaggedTensor are fit to be used as they are: the op checks them once more.
    checked = isinstance(r.ids, tf.RaggedTensor) and r.weights is None and r.table.world_size == 1
    return csr.row_splits, Feature(r.table, csr, r.combiner, checked=checked)


def _singles(table: EmbeddingVariable, keys: tf.Tensor) -> Feature:
    """Each key [N] a segment of its own: pooled, they are the rows."""
    return Feature(table, Csr(keys, tf.range(tf.size(keys, out_type=tf.int64) + 1)), "sum", checked=True)


def _padded(rows: tf.Tensor, row_splits: tf.Tensor) -> tf.Tensor:
    """Rows [N, D] as [S, T, D], zeros where a segment has fewer than T."""
    padded = tf.RaggedTensor.from_row_splits(rows, row_splits, validate=False).to_tensor()
    padded.set_shape([None, None, rows.shape[-1]])
    return padded


def _in_shape_of(keys: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    dim = rows.shape[-1]
    shaped = tf.reshape(rows, tf.concat([tf.shape(keys), [dim]], 0))
    shaped.set_shape(keys.shape.concatenate([dim]))
    return shaped


def _chunks(requests: list[Request], size: int | None) -> list[list[Request]]:
    if size is None:
        return [requests]
    if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
        raise ValueError(f"`params_num_per_group` must be None or a whole number, at least 1. Received: {size!r}.")
    size = min(int(size), max(len(requests), 1))  # DeepRec says sys.maxsize for all
    return [requests[i : i + size] for i in range(0, len(requests), size)]


def _as_list(argument: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"`{argument}` must be a list or tuple, one entry per feature. Received: {value!r}.")
    return list(value)


def _one_each(argument: str, value: Any, count: int) -> list[Any]:
    values = _as_list(argument, value)
    if len(values) != count:
        raise ValueError(f"`{argument}` must have one entry per table, {count}. Received: {len(values)}.")
    return values


def _check_combiners(combiners: Any, count: int) -> list[str]:
    if combiners is None:
        return ["mean"] * count
    values = [combiners] * count if isinstance(combiners, str) else list(combiners)
    if len(values) != count:
        raise ValueError(f"`combiners` must be one string or one per table, {count}. Received: {len(values)}.")
    lowered = [v.lower() if isinstance(v, str) else v for v in values]
    for i, v in enumerate(lowered):
        if v not in _COMBINERS:
            raise ValueError(f"`combiners[{i}]` must be 'sum', 'mean' or 'sqrtn'. Received: {values[i]!r}.")
    return lowered


def _check_strategy(partition_strategy: Any) -> None:
    if partition_strategy != "mod":
        raise ValueError(
            "`partition_strategy` must be 'mod': a key belongs to worker key % workers, which is what lets a table "
            f"take keys without end. Received: {partition_strategy!r}."
        )


def _check_tables(params: list[Any]) -> None:
    for i, table in enumerate(params):
        if not is_embedding_variable(table):
            raise TypeError(f"`params[{i}]` must be a sok.EmbeddingVariable. Received: {table!r}.")
