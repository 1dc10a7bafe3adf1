"""Tables in variable scopes of TensorFlow 1: named by them, and shared where a scope reuses its variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.table.table import EmbeddingVariable


def scoped_table(
    name: str, dim: int, capacity: int, kind: type[EmbeddingVariable] = EmbeddingVariable, **options: Any
) -> EmbeddingVariable:
    """The table `name` of the current variable scope.

    Args:
        name: within the scope.
        dim, capacity, options: as `EmbeddingVariable` takes them; of a table that is there only `dim` is compared.
        kind: its class.

    Returns:
        In a v1 graph what `tf.compat.v1.get_variable` would give: a new table, or with `reuse` that of this name. When
        executing eagerly, where variable scopes hold nothing, always a new one.

    Raises:
        ValueError: the scope reuses and has no such table, or does not reuse and has one; the table has another dim.
    """
    scope = tf.compat.v1.get_variable_scope()
    full_name = f"{scope.name}/{name}" if scope.name else name
    with tf.init_scope():
        if tf.executing_eagerly():
            return kind(dim, capacity, name=full_name, **options)
        # In the graph and not beside it: tables hold on to their graph, so that it would never be freed.
        graph = tf.compat.v1.get_default_graph()
        tables = graph._sok_tables = getattr(graph, "_sok_tables", {})
    found = tables.get(full_name)
    if found is None and scope.reuse is True:
        raise ValueError(
            f"Table '{full_name}' does not exist, and the variable scope reuses variables. Make it without reuse "
            "first, or use reuse=tf.compat.v1.AUTO_REUSE."
        )
    if found is not None and not scope.reuse:
        raise ValueError(
            f"Table '{full_name}' already exists. To share it, set reuse=True or tf.compat.v1.AUTO_REUSE in the "
            "variable scope; for another table, take another name."
        )
    if found is None:
        found = tables[full_name] = kind(dim, capacity, name=full_name, **options)
    if found.dim != dim:
        raise ValueError(f"Table '{full_name}' has rows of dim {found.dim}. Received: dim {dim}.")
    return found
