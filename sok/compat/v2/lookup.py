"""SOK v2's lookups: `lookup_sparse` and `all2all_dense_embedding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from sok.base.types import Ids, TensorLike
from sok.compat.v2.variable import KINDS
from sok.lookup import lookup
from sok.lookup.group import group_embedding_lookup_sparse
from sok.table.table import EmbeddingVariable, checked_table


def lookup_sparse(
    params: EmbeddingVariable | Sequence[EmbeddingVariable],
    sp_ids: Ids | Sequence[Ids],
    sp_weights: Ids | Sequence[Ids | None] | None = None,
    combiners: str | Sequence[str] | None = None,
    use_low_frequency_filter: bool = False,
) -> Any:
    """Looks up and pools the ids of one or many features, each in its own table, by one exchange.

    Each is looked up as by `tf.nn.embedding_lookup_sparse`, except that an empty sample gives zeros. Keys that a
    `sok.DynamicVariable` has not seen get a row.

    Args:
        params: a `sok.Variable`, `sok.DynamicVariable` or other embedding variable, or a list or tuple of them, of any
            widths and kinds. The same one may come several times.
        sp_ids: ids of each: SparseTensor [B, n], RaggedTensor [B, None] or dense [B, n], int32 or int64.
        sp_weights: None, or for each None or weights in the form of its ids.
        combiners: 'sum', 'mean' (also called 'average') or 'sqrtn', in any capitalisation: one for all, or one each.
            None: 'mean'.
        use_low_frequency_filter: True only says that every table has an `admission` of its own, which decides in every
            lookup: `sok.DynamicVariable(..., table=sok.TableOptions(admission=sok.Admission(after=n)))`.

    Returns:
        [B, D] float32, or a list of them if `params` is a list or tuple. Differentiable in the tables and weights.

    Raises:
        TypeError, ValueError: as `sok.group_embedding_lookup_sparse`; `use_low_frequency_filter` is set, and a table
            admits every key.
        tf.errors.InvalidArgumentError: malformed ids, or a row number outside a `sok.Variable`; on every worker.
        tf.errors.ResourceExhaustedError: a table is full; on every worker.

    Collective: two collectives, whatever the number of tables, and one for the gradient.

    Example:
        >>> import sok, tensorflow as tf
        >>> user, item = sok.Variable([[1.0], [2.0], [4.0]]), sok.DynamicVariable(2, initializer="3")
        >>> ids = tf.ragged.constant([[0, 2], [], [1]])
        >>> pooled = sok.lookup_sparse([user, item], [ids, ids], combiners=["sum", "mean"])
        >>> pooled[0].numpy().tolist(), pooled[1].numpy().tolist()
        ([[5.0], [0.0], [2.0]], [[3.0, 3.0], [0.0, 0.0], [3.0, 3.0]])

    Source: `lookup_sparse` of SOK v2. Weighted means are divided by the sum of the weights, there as here.
    """
    if use_low_frequency_filter:
        _check_admission(params)
    if isinstance(params, (list, tuple)):
        ids, weights = cast("Sequence[Ids]", sp_ids), cast("Sequence[Ids | None] | None", sp_weights)
        return group_embedding_lookup_sparse(params, ids, _our_words(combiners), sp_weights=weights)
    weights = None if sp_weights is None else [sp_weights]
    return group_embedding_lookup_sparse([params], [sp_ids], _our_words(combiners), sp_weights=weights)[0]


def all2all_dense_embedding(param: EmbeddingVariable, indices: TensorLike) -> tf.Tensor:
    """The row of each id, from the worker that holds it.

    It looks up as `tf.nn.embedding_lookup` does in the whole table. Keys that a `sok.DynamicVariable` has not seen get
    a row.

    Args:
        param: a `sok.Variable`, `sok.DynamicVariable` or other embedding variable.
        indices: [...] integers.

    Returns:
        [..., D] float32. Differentiable in the table.

    Raises:
        TypeError: `param` is no embedding variable.
        ValueError: ids that are not integers, or do not fit into the table's keys.
        tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError: as `lookup_sparse`.

    Collective: two collectives, and one for the gradient.

    Example:
        >>> import sok
        >>> sok.all2all_dense_embedding(sok.Variable([[1.0, 2.0], [3.0, 4.0]]), [[1], [0]]).numpy().tolist()
        [[[3.0, 4.0]], [[1.0, 2.0]]]

    Source: `all2all_dense_embedding` of SOK v2.
    """
    return lookup.lookup_rows(checked_table(param, "param", KINDS), indices, training=True)


def _check_admission(params: Any) -> None:
    for table in params if isinstance(params, (list, tuple)) else [params]:
        if isinstance(table, EmbeddingVariable) and table.options.admission is None:
            raise ValueError(
                f"`use_low_frequency_filter` must be False: table '{table.table_name}' gives a row to every key that "
                "is looked up. Make it with table=sok.TableOptions(admission=sok.Admission(after=n)) to filter."
            )


def _our_words(combiners: Any) -> Any:
    if isinstance(combiners, (list, tuple)):
        return [_our_words(combiner) for combiner in combiners]
    return "mean" if isinstance(combiners, str) and combiners.lower() == "average" else combiners
