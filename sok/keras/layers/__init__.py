"""Keras layers over tables. `for_keras` gives them for an explicitly imported Keras."""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

from sok.keras.layers.all2all_dense_embedding import All2AllDenseEmbeddingMixin
from sok.keras.layers.distributed_embedding import DistributedEmbeddingMixin
from sok.keras.layers.registry import get_embedding

__all__ = ["All2AllDenseEmbedding", "DistributedEmbedding", "for_keras", "get_embedding"]

_MIXINS: dict[str, type[DistributedEmbeddingMixin | All2AllDenseEmbeddingMixin]] = {
    "DistributedEmbedding": DistributedEmbeddingMixin,
    "All2AllDenseEmbedding": All2AllDenseEmbeddingMixin,
}
_made: dict[type, types.SimpleNamespace] = {}


def for_keras(keras: Any) -> types.SimpleNamespace:
    """Gives the layers as classes of `keras`: Keras 3, or an explicitly imported `tf_keras`.

    `sok.DistributedEmbedding` and `sok.All2AllDenseEmbedding` are those for `tf.keras`.

    Returns:
        A namespace with `DistributedEmbedding` and `All2AllDenseEmbedding`, the same classes in every call.

    Example:
        >>> import tf_keras
        >>> issubclass(for_keras(tf_keras).DistributedEmbedding, tf_keras.layers.Layer)
        True
    """
    # tf.keras and the module it stands for have one Layer, and get one pair of classes.
    if keras.layers.Layer not in _made:
        register = keras.utils.register_keras_serializable(package="sok")
        layers = {name: register(_make(name, mixin, keras)) for name, mixin in _MIXINS.items()}
        _made[keras.layers.Layer] = types.SimpleNamespace(**layers)
    return _made[keras.layers.Layer]


def _make(name: str, mixin: type[DistributedEmbeddingMixin | All2AllDenseEmbeddingMixin], keras: Any) -> type:
    layer = keras.layers.Layer
    body: dict[str, Any] = {"__doc__": mixin.__doc__, "__module__": __name__, "_keras_initializers": keras.initializers}
    if layer.__module__.startswith("tf_keras"):
        # In a bare call tf_keras replaces None by False, whereas Keras 3 hands a default of True on to the layers after
        # this one: each needs its own default for "training, unless Keras says otherwise".
        call = mixin.call
        defaults = (True, *(call.__defaults__ or ())[1:])
        body["call"] = types.FunctionType(call.__code__, call.__globals__, "call", defaults, call.__closure__)
        body["call"].__annotations__ = call.__annotations__
    return type(name, (mixin, layer), body)


DistributedEmbedding = for_keras(tf.keras).DistributedEmbedding
All2AllDenseEmbedding = for_keras(tf.keras).All2AllDenseEmbedding
