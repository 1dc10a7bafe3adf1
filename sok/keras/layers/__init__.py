"""Keras layers over tables. `for_keras` gives them for an explicitly imported Keras."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok.base.types import Condition, Ids
from sok.keras.layers.all2all_dense_embedding import All2AllDenseEmbeddingMixin
from sok.keras.layers.distributed_embedding import DistributedEmbeddingMixin
from sok.keras.layers.embedding import EmbeddingMixin
from sok.keras.layers.embedding_collection import EmbeddingCollectionMixin
from sok.keras.layers.registry import get_embedding

__all__ = [
    *("All2AllDenseEmbedding", "DistributedEmbedding", "Embedding", "EmbeddingCollection", "for_keras"),
    "get_embedding",
]


# Each Keras needs its own default for "training, unless Keras says otherwise": in a bare call tf_keras replaces None by
# False, whereas Keras 3 hands a default of True on to the layers after this one.


class _DistributedInTfKeras(DistributedEmbeddingMixin):
    def call(self, inputs: Ids, training: Condition | None = True, weights: Ids | None = None) -> tf.Tensor:
        return super().call(inputs, training, weights)


class _All2AllInTfKeras(All2AllDenseEmbeddingMixin):
    def call(self, inputs: Ids, training: Condition | None = True) -> tf.Tensor:
        return super().call(inputs, training)


class _EmbeddingInTfKeras(EmbeddingMixin):
    def call(self, inputs: Ids, training: Condition | None = True) -> Any:
        return super().call(inputs, training)


class _CollectionInTfKeras(EmbeddingCollectionMixin):
    def call(self, inputs: Sequence[Ids], training: Condition | None = True) -> list[Any]:
        return super().call(inputs, training)


_MIXINS = {  # for Keras 3, and for tf_keras
    "Embedding": (EmbeddingMixin, _EmbeddingInTfKeras),
    "DistributedEmbedding": (DistributedEmbeddingMixin, _DistributedInTfKeras),
    "All2AllDenseEmbedding": (All2AllDenseEmbeddingMixin, _All2AllInTfKeras),
    "EmbeddingCollection": (EmbeddingCollectionMixin, _CollectionInTfKeras),
}
_made: dict[type, types.SimpleNamespace] = {}


def for_keras(keras: types.ModuleType) -> types.SimpleNamespace:
    """Gives the layers as classes of `keras`: Keras 3, or an explicitly imported `tf_keras`.

    `sok.Embedding`, `sok.DistributedEmbedding` and `sok.All2AllDenseEmbedding` are those for `tf.keras`.

    Returns:
        A namespace with these names and `EmbeddingCollection`, the same classes in every call.

    Example:
        >>> import tf_keras
        >>> issubclass(for_keras(tf_keras).DistributedEmbedding, tf_keras.layers.Layer)
        True
    """
    # tf.keras and the module it stands for have one Layer, and get the same classes.
    layer = keras.layers.Layer
    if layer not in _made:
        register = keras.utils.register_keras_serializable(package="sok")
        _made[layer] = types.SimpleNamespace()
        of_keras = {"__module__": __name__, "_keras_initializers": keras.initializers}
        of_keras |= {"_keras": keras, "_classes": _made[layer]}
        for name, mixins in _MIXINS.items():
            mixin = mixins[layer.__module__.startswith("tf_keras")]
            base = keras.layers.Embedding if name == "Embedding" else layer
            made = type(name, (mixin, base), {"__doc__": mixins[0].__doc__, **of_keras})
            setattr(_made[layer], name, register(made))
    return _made[layer]


Embedding = for_keras(tf.keras).Embedding
DistributedEmbedding = for_keras(tf.keras).DistributedEmbedding
All2AllDenseEmbedding = for_keras(tf.keras).All2AllDenseEmbedding
EmbeddingCollection = for_keras(tf.keras).EmbeddingCollection
