"""Reading and writing the rows of this worker, and telling tables from other variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok.base.types import TensorLike
from sok.compat.v2.variable import KINDS, StaticVariable
from sok.table.splitting import split_embedding_variable_from_others
from sok.table.table import EmbeddingVariable, checked_table


def filter_variables(variables: Iterable[Any]) -> tuple[list[EmbeddingVariable], list[Any]]:
    """Splits variables into tables (of any kind) and the rest, each in the order given.

    Args:
        variables: any variables.

    Returns:
        (embedding variables, other variables).

    Example:
        >>> import sok, tensorflow as tf
        >>> matrix, weight = sok.Variable([[3.0, 4.0, 5.0]]), tf.Variable(1.0)
        >>> tables, others = sok.filter_variables([weight, matrix])
        >>> tables[0] is matrix, others[0] is weight
        (True, True)

    Source: `filter_variables` of SOK v2.
    """
    tables, others = split_embedding_variable_from_others(list(variables))
    return list(tables), list(others)


def assign(variable: EmbeddingVariable, indices: TensorLike, values: TensorLike) -> tf.Operation | None:
    """Stores rows of this worker, making those that are missing.

    Args:
        variable: an embedding variable of any kind.
        indices: [n] keys. Those that other workers hold are ignored, so all workers may pass all keys.
        values: [n, D] float32.

    Returns:
        None, or in a v1 graph the op to run. Not collective.

    Raises:
        TypeError: `variable` is no embedding variable.
        tf.errors.ResourceExhaustedError: there is no room; nothing was stored.
        tf.errors.InvalidArgumentError: shapes do not fit, or a row number is outside a `sok.Variable`.

    Example:
        >>> import sok
        >>> table = sok.DynamicVariable(2)
        >>> sok.assign(table, [7, -1], [[1.0, 2.0], [3.0, 4.0]])
        >>> sok.all2all_dense_embedding(table, [-1]).numpy().tolist()
        [[3.0, 4.0]]

    Source: `assign` of SOK v2.
    """
    return checked_table(variable, "variable", KINDS).assign(indices, values)


def export(variable: EmbeddingVariable) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of this worker, sorted by key; on the CPU.

    Args:
        variable: an embedding variable of any kind. Of a `sok.Variable` all rows of this worker come, of others those
            in use.

    Returns:
        indices [n], of the `key_type` of a `sok.DynamicVariable`, else of the table's keys; and values [n, D] float32.
        Not collective.

    Raises:
        TypeError: `variable` is no embedding variable.
        tf.errors.InvalidArgumentError: a key does not fit into the `key_type`.

    Example:
        >>> import sok
        >>> table = sok.DynamicVariable(1, initializer="2")
        >>> _ = sok.all2all_dense_embedding(table, [8, 3])
        >>> indices, values = sok.export(table)
        >>> indices.numpy().tolist(), values.numpy().tolist()
        ([3, 8], [[2.0], [2.0]])

    Source: `export` of SOK v2, which promises no order.
    """
    with tf.device("/CPU:0"):
        if isinstance(checked_table(variable, "variable", KINDS), StaticVariable):
            return variable.local_indices(), variable.local_rows()
        keys, rows = variable.export()
        order = tf.argsort(keys, stable=True)
        return as_key_type(tf.gather(keys, order), variable), tf.gather(rows, order)


def as_key_type(keys: tf.Tensor, variable: EmbeddingVariable) -> tf.Tensor:
    """Keys of the variable's table in the dtype that its user knows; an error if one does not fit."""
    key_type = getattr(variable, "key_type", keys.dtype)
    cast = tf.cast(keys, key_type)
    if key_type == keys.dtype:
        return cast
    text = f"table '{variable.table_name}' was looked up with ids that its key_type {key_type.name} does not hold"
    check = tf.debugging.assert_equal(tf.cast(cast, keys.dtype), keys, text)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(cast)
