"""Many tables, one lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import tensorflow as tf

from sok.base.types import Condition, DTypeLike, Ids
from sok.lookup import plain_variables
from sok.lookup.feature import PADDED, ROWS, Feature, check_combiner
from sok.lookup.lookup import lookup_group, lookup_parts
from sok.table.table import is_embedding_variable


def group_embedding_lookup_sparse(
    params: Sequence[Any],
    sp_ids: Sequence[Ids],
    combiners: str | Sequence[str] | None = None,
    *,
    partition_strategy: str = "mod",
    sp_weights: Sequence[Ids | None] | None = None,
    is_sequence: bool = False,
    params_num_per_group: int | None = None,
    training: Condition = True,
    exchange_dtype: DTypeLike | None = None,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Looks up and pools the ids of many features, each in its own table, in one op.

    Each is looked up as by `tf.nn.embedding_lookup_sparse`, except that an empty sample gives zeros, at the end of the
    batch too. Where stock TensorFlow pays for kernels and Python calls per table, this pays once for the group, and all
    processors work on all tables. On several workers the group is one exchange: two collectives forward, one backward.

    Args:
        params: tables (EmbeddingVariable) of any widths and key dtypes, ordinary variables (tf.Variable) [rows, dim] of
            any float dtype, or both. The same one may come several times.
        sp_ids: for each, integer ids as SparseTensor [batch, n], RaggedTensor [batch, None] (its values are not copied)
            or dense [batch, n]. The last index of a SparseTensor is ignored, as in TensorFlow.
        combiners: 'sum', 'mean' or 'sqrtn', in any capitalisation; one for all or one each. None: 'mean'.
        partition_strategy: 'mod', and no other: a table's `placement` says which worker has a key.
        sp_weights: None, or for each feature None or weights in the form of its ids: sum(w e), sum(w e) / sum(w) and
            sum(w e) / sqrt(sum(w^2)).
        is_sequence: whether to return the rows of each sample one after the other instead of pooling them.
        params_num_per_group: how many features one op, or exchange, has at most. None: all of them.
        training: whether unseen ids of tables get a row; without, they read as the row they would get.
        exchange_dtype: None. The table says in which dtype its rows travel: `EmbeddingVariable(exchange_dtype=...)`.
        name: of the scope of the ops.

    Returns:
        A list of float32 (of an ordinary variable: its dtype) [batch, dim], one per feature. With `is_sequence`
        [batch, T, dim], where T is the largest number of ids that a sample of this feature has, filled up with zeros.
        Differentiable in tables, variables and weights.

    Raises:
        TypeError: `params` or `sp_ids` is not a list, or an entry of `params` is no variable.
        ValueError: lists of different lengths, an unknown combiner or strategy, ids of an unknown form, weights for a
            sequence.
        tf.errors.InvalidArgumentError: malformed ids, or an id outside an identity table; on every worker. The same of
            an ordinary variable; on every worker if the list has a table, else on this one.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. Rows that other tables of the group made for
            this call stay.

    Every worker has ordinary variables whole, and reads them where they lie, all of float32 in one op for all
    processors. Their gradients are those of dense weights: `sok.DistributedOptimizer` averages them.

    Collective if the list has a table.

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
    per_group = check_per_group(params_num_per_group)
    refuse_exchange_dtype(exchange_dtype)
    variables, dtypes = _check_params(params)
    if is_sequence and any(w is not None for w in weights):
        raise ValueError("`sp_weights` must be None with is_sequence=True: rows that are not pooled have no weights.")
    if is_sequence:
        combiners = [PADDED] * len(params)
    features = [
        Feature(*given, ids_called=f"sp_ids[{i}]", weights_called=f"sp_weights[{i}]")
        for i, given in enumerate(zip(variables, sp_ids, combiners, weights, dtypes, strict=True))
    ]
    with tf.name_scope(name or "group_embedding_lookup_sparse"):
        return [output for of_part in lookup_parts(chunks(features, per_group), training) for output in of_part]


def group_embedding_lookup(
    params: Sequence[Any],
    ids: Sequence[Ids],
    partition_strategy: str = "mod",
    name: str | None = None,
    *,
    training: Condition = True,
    exchange_dtype: DTypeLike | None = None,
) -> list[tf.Tensor]:
    """Looks up the rows of many features, each in its own table, in one op.

    Each is looked up as by `tf.nn.embedding_lookup`. On several workers the group is one exchange: two collectives
    forward, one backward.

    Args:
        params: tables (EmbeddingVariable) of any widths and key dtypes, ordinary variables (tf.Variable) [rows, dim] of
            any float dtype, or both. The same one may come several times.
        ids: for each, integer ids of any shape.
        partition_strategy: 'mod', and no other: a table's `placement` says which worker has a key.
        name: of the scope of the ops.
        training: whether unseen ids get a row; without, they read as the row they would get.
        exchange_dtype: None, as in `group_embedding_lookup_sparse`.

    Returns:
        A list of float32 (of an ordinary variable: its dtype) [*shape of the ids, dim], one per feature. Differentiable
        in tables and variables.

    Raises:
        TypeError: `params` or `ids` is not a list, or an entry of `params` is no variable.
        ValueError: lists of different lengths, an unknown strategy, ids that are no integers.
        tf.errors.InvalidArgumentError: an id outside an identity table; on every worker. An id that is no row of an
            ordinary variable; on every worker if the list has a table, else on this one.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. Rows that other tables of the group made for
            this call stay.

    Collective if the list has a table.

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
    refuse_exchange_dtype(exchange_dtype)
    features = [
        Feature(v, i, ROWS, dtype=d, ids_called=f"ids[{n}]")
        for n, (v, d, i) in enumerate(zip(*_check_params(params), ids, strict=True))
    ]
    with tf.name_scope(name or "group_embedding_lookup"):
        return lookup_group(features, training)


def check_per_group(size: object) -> int | None:
    """`params_num_per_group`, if that is None or a whole number of at least 1."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, SupportsIndex) or int(size) < 1):
        raise ValueError(f"`params_num_per_group` must be None or a whole number, at least 1. Received: {size!r}.")
    return None if size is None else int(size)


def refuse_exchange_dtype(dtype: object) -> None:
    """`ValueError` unless `exchange_dtype` is None."""
    if dtype is not None:
        raise ValueError(
            "`exchange_dtype` is said once, by the table: sok.EmbeddingVariable(exchange_dtype=...), or the argument "
            f"of that name of a layer or column. Received: {dtype!r}."
        )


def chunks(items: list[Any], size: int | None) -> list[list[Any]]:
    """`items` in parts of at most `size`, in order; None: in one."""
    size = min(size or len(items), len(items)) or 1  # DeepRec says sys.maxsize for all
    return [items[i : i + size] for i in range(0, len(items), size)]


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
    return [check_combiner(v, f"combiners[{i}]") for i, v in enumerate(values)]


def _check_strategy(partition_strategy: Any) -> None:
    if partition_strategy != "mod":
        raise ValueError(
            "`partition_strategy` must be 'mod': a key belongs to worker key % workers, which is what lets a table "
            f"take keys without end. Received: {partition_strategy!r}."
        )


def _check_params(params: list[Any]) -> tuple[list[Any], list[tf.DType | None]]:
    """Tables as they are, and the TensorFlow variables behind the others; what results are cast to, None: nothing."""
    checked, dtypes = [], []
    for i, param in enumerate(params):
        variable = param if is_embedding_variable(param) else plain_variables.as_plain_variable(param)
        if variable is None:
            raise TypeError(
                f"`params[{i}]` must be a sok.EmbeddingVariable or a tf.Variable that is not split into partitions. "
                f"Received: {param!r}."
            )
        checked.append(variable)
        dtypes.append(None if is_embedding_variable(param) else plain_variables.cast_to(param, variable))
    return checked, dtypes
