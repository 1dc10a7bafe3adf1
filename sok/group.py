"""Many tables, one lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok import exchange, lookup
from sok.inputs import to_csr
from sok.table import EmbeddingVariable, is_embedding_variable

_COMBINERS = ("sum", "mean", "sqrtn")


def group_embedding_lookup_sparse(
    params: Sequence[EmbeddingVariable],
    sp_ids: Sequence[Any],
    combiners: str | Sequence[str] | None = None,
    *,
    sp_weights: Sequence[Any] | None = None,
    training: Any = True,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Looks up and pools the ids of many features, each in its own table, in one op.

    Same as `tf.nn.embedding_lookup_sparse` for each of them, but that an empty sample gives zeros. Where stock
    TensorFlow pays for kernels and Python calls per table, this pays once for the group, and all processors work on all
    tables. On several workers the group is one exchange: two collectives forward, one backward.

    Args:
        params: tables of any widths and key dtypes. The same table may come several times.
        sp_ids: for each, integer ids as SparseTensor [batch, n], RaggedTensor [batch, None] (its values are not copied)
            or dense [batch, n].
        combiners: 'sum', 'mean' or 'sqrtn', in any capitalisation; one for all or one each. None: 'mean'.
        sp_weights: None, or for each feature None or weights in the form of its ids: sum(w e), sum(w e) / sum(w) and
            sum(w e) / sqrt(sum(w^2)).
        training: whether unseen ids get a row; without, they read as the row they would get.
        name: of the scope of the ops.

    Returns:
        A list of float32 [batch, dim], one per feature. Differentiable in the tables and the weights.

    Raises:
        TypeError: a table is not an EmbeddingVariable.
        ValueError: lists of different lengths, an unknown combiner, ids of an unknown form.
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

    Source: `group_embedding_lookup_sparse` of DeepRec.
    """
    params, sp_ids = list(params), list(sp_ids)
    combiners = _one_each("combiners", "mean" if combiners is None else combiners, len(params))
    weights = [None] * len(params) if sp_weights is None else list(sp_weights)
    for argument, values in (("sp_ids", sp_ids), ("sp_weights", weights)):
        if len(values) != len(params):
            raise ValueError(f"`{argument}` must have one entry per table, {len(params)}. Received: {len(values)}.")
    for i, table in enumerate(params):
        if not is_embedding_variable(table):
            raise TypeError(f"`params[{i}]` must be a sok.EmbeddingVariable. Received: {table!r}.")
    if not params:
        return []
    features = []
    with tf.name_scope(name or "group_embedding_lookup_sparse"), exchange.told_to_peers(*params):
        for i, (table, ids) in enumerate(zip(params, sp_ids, strict=True)):
            # 64-bit splits of a RaggedTensor are fit to be used as they are: the op checks them once more.
            csr = to_csr(ids, 1, table.key_dtype, table.table_name, weights[i])
            checked = isinstance(ids, tf.RaggedTensor) and table.world_size == 1
            features.append(lookup.Feature(table, csr, combiners[i], checked=checked))
    with tf.name_scope(name or "group_embedding_lookup_sparse"):
        return lookup.lookup_group(features, training)


def _one_each(argument: str, value: Any, count: int) -> list[str]:
    values = [value] * count if isinstance(value, str) else list(value)
    if len(values) != count:
        raise ValueError(f"`{argument}` must be one string or one per table, {count}. Received: {len(values)}.")
    lowered = [v.lower() if isinstance(v, str) else v for v in values]
    for i, v in enumerate(lowered):
        if v not in _COMBINERS:
            raise ValueError(f"`{argument}[{i}]` must be 'sum', 'mean' or 'sqrtn'. Received: {values[i]!r}.")
    return lowered
