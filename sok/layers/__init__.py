"""Keras layers over tables. `for_keras` gives them for an explicitly imported Keras."""

from __future__ import annotations

import functools
import types
from typing import Any

import tensorflow as tf

from sok.layers.all2all_dense_embedding import All2AllDenseEmbeddingMixin
from sok.layers.distributed_embedding import DistributedEmbeddingMixin
from sok.layers.registry import get_embedding

__all__ = ["All2AllDenseEmbedding", "DistributedEmbedding", "for_keras", "get_embedding"]


@functools.cache
def for_keras(keras: Any) -> types.SimpleNamespace:
    """The layers as classes of `keras`: Keras 3, or an explicitly imported `tf_keras`.

    `sok.DistributedEmbedding` and `sok.All2AllDenseEmbedding` are those for `tf.keras`.

    Example:
        >>> import tf_keras
        >>> issubclass(for_keras(tf_keras).DistributedEmbedding, tf_keras.layers.Layer)
        True
    """
    register = keras.utils.register_keras_serializable(package="sok")
    layers = {}
    for name, mixin in (
        ("DistributedEmbedding", DistributedEmbeddingMixin),
        ("All2AllDenseEmbedding", All2AllDenseEmbeddingMixin),
    ):
        body = {"__doc__": mixin.__doc__, "__module__": __name__}
        layers[name] = register(type(name, (mixin, keras.layers.Layer), body))
    return types.SimpleNamespace(**layers)


DistributedEmbedding = for_keras(tf.keras).DistributedEmbedding
All2AllDenseEmbedding = for_keras(tf.keras).All2AllDenseEmbedding
