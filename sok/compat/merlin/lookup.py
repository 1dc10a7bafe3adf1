"""`embedding_lookup` of Merlin's distributed-embeddings."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.base.types import Ids, Variable
from sok.lookup.feature import ROWS, Feature, check_combiner
from sok.lookup.inputs import describe
from sok.lookup.lookup import lookup_group
from sok.lookup.plain_variables import as_plain_variable
from sok.table.table import EmbeddingVariable


def embedding_lookup(param: Variable | EmbeddingVariable, ids: Ids, combiner: str | None = None) -> Any:
    """Looks up rows of a matrix that this worker has whole, and pools them.

    Args:
        param: a variable or tensor [n, D] of floats.
        ids: integers, [B, h] dense, RaggedTensor [B, None] or SparseTensor [B, n]; with any number of ids in a sample,
            none too.
        combiner: None: each id's row. 'sum', 'mean' or 'sqrtn', as in `tf.nn.embedding_lookup_sparse`; a sample without
            ids gives zeros.

    Returns:
        [B, D]; without a combiner [B, h, D], ragged where `ids` are. Differentiable: the gradient of a float32 variable
        is `tf.IndexedSlices` in which no row comes twice. Not collective.

    Raises:
        TypeError: `param` is no tensor and no variable.
        ValueError: ids are not of two dimensions, the combiner is none of these, a SparseTensor without one.
        tf.errors.InvalidArgumentError: an id is not in [0, n).

    Example:
        >>> matrix = tf.Variable([[1.0], [2.0], [4.0]])
        >>> embedding_lookup(matrix, tf.ragged.constant([[0, 1], [], [2]], dtype=tf.int64), "sum").numpy().tolist()
        [[3.0], [0.0], [4.0]]
    """
    variable = as_plain_variable(param)
    if variable is None and not tf.is_tensor(param):
        raise TypeError(f"param must be Tensor, or a variable. Received: {param!r}.")
    variable = param if variable is None else variable
    combiner = None if combiner is None else check_combiner(combiner)
    if not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        ids = tf.convert_to_tensor(ids)
    if ids.shape.rank != 2:
        raise ValueError(f"Only support 2D input. Received: {describe(ids)}.")
    if combiner is not None:
        return lookup_group([Feature(variable, ids, combiner)])[0]
    if isinstance(ids, tf.SparseTensor):
        raise ValueError("`combiner` must be 'sum', 'mean' or 'sqrtn' for a SparseTensor. Received: None.")
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(lookup_group([Feature(variable, ids.flat_values, ROWS)])[0])
    return lookup_group([Feature(variable, ids, ROWS)])[0]
