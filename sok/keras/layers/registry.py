"""Layers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_eager: dict[str, Any] = {}


def get_embedding(name: str, constructor: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Returns the layer called `name`. `constructor(**kwargs)` makes it the first time, in each v1 graph anew.

    Args:
        name: any string.
        constructor: makes the layer if there is none yet; it is given `name` too.
        **kwargs: for the constructor.

    Raises:
        ValueError: there is no such layer and no constructor.

    Example:
        >>> import sok
        >>> args = dict(combiner="sum", max_vocabulary_size_per_gpu=8, embedding_vec_size=2, slot_num=1, max_nnz=1)
        >>> a = get_embedding("ads", sok.DistributedEmbedding, **args)
        >>> get_embedding("ads") is a
        True

    Source: `get_embedding` of SOK v1.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            layers = _eager
        else:
            # In the graph itself: layers reach their graph, so that a map beside it would keep both for ever.
            graph = tf.compat.v1.get_default_graph()
            layers = graph._sok_layers = getattr(graph, "_sok_layers", {})
    if name not in layers:
        if constructor is None:
            raise ValueError(f"There is no embedding layer named {name!r}. Pass `constructor` to make one.")
        layers[name] = constructor(name=name, **kwargs)
    return layers[name]
