"""`lookup_sparse` with the arguments of the releases that had `experiment`: the later ones know weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import sok
from sok import all2all_dense_embedding
from sok.base.types import Ids
from sok.table.table import EmbeddingVariable

__all__ = ["all2all_dense_embedding", "lookup_sparse"]


def lookup_sparse(
    params: EmbeddingVariable | Sequence[EmbeddingVariable],
    sp_ids: Ids | Sequence[Ids],
    sp_weights: Ids | Sequence[Ids | str | None] | None = None,
    combiners: str | Sequence[str] | None = None,
) -> Any:
    """Same as `sok.lookup_sparse`; combiners may also come third, as where there were no weights.

    Example:
        >>> import tensorflow as tf
        >>> ids = tf.ragged.constant([[0, 1], []])
        >>> lookup_sparse([sok.Variable([[1.0], [2.0]])], [ids], ["sum"])[0].numpy().tolist()
        [[3.0], [0.0]]

    Source: `experiment.lookup_sparse` of SOK 1.1.4.
    """
    if sp_weights is not None and all(isinstance(word, str) for word in tf.nest.flatten(sp_weights)):
        sp_weights, combiners = combiners, sp_weights
    return sok.lookup_sparse(params, sp_ids, sp_weights, combiners)
