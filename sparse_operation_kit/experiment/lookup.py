"""`lookup_sparse` with the arguments of SOK 1.1.4, which knew no weights."""

from __future__ import annotations

from typing import Any

import sok
from sok import all2all_dense_embedding

__all__ = ["all2all_dense_embedding", "lookup_sparse"]


def lookup_sparse(params: Any, sp_ids: Any, combiners: Any = None, *, sp_weights: Any = None) -> Any:
    """Same as `sok.lookup_sparse`, but that combiners come third.

    Example:
        >>> import tensorflow as tf
        >>> ids = tf.ragged.constant([[0, 1], []])
        >>> lookup_sparse([sok.Variable([[1.0], [2.0]])], [ids], ["sum"])[0].numpy().tolist()
        [[3.0], [0.0]]

    Source: `experiment.lookup_sparse` of SOK 1.1.4.
    """
    return sok.lookup_sparse(params, sp_ids, sp_weights, combiners)
