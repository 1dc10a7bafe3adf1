"""Tables among variables: they are trained in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sok.table.table import EmbeddingVariable, is_embedding_variable


def split_embedding_variable_from_others(
    variables: Sequence[Any],
) -> tuple[tuple[EmbeddingVariable, ...], tuple[Any, ...]]:
    """Splits variables into tables and the rest, which are trained in different ways.

    Args:
        variables: list or tuple of variables.

    Returns:
        (embedding variables, other variables), two tuples, each in the order given.

    Raises:
        ValueError: `variables` is not a list or tuple.

    Example:
        >>> import sok
        >>> import tensorflow as tf
        >>> table, weight = sok.EmbeddingVariable(2, 10, name="split"), tf.Variable(1.0)
        >>> embeddings, others = split_embedding_variable_from_others([weight, table])
        >>> embeddings[0] is table, others[0] is weight
        (True, True)

    Source: `split_embedding_variable_from_others` of SOK v1.
    """
    if not isinstance(variables, (list, tuple)):
        raise ValueError(f"`variables` must be a list or tuple. Received: {type(variables).__name__}.")
    embeddings = tuple(v for v in variables if is_embedding_variable(v))
    return embeddings, tuple(v for v in variables if not is_embedding_variable(v))
