"""TensorFlow's own embedding columns, made in a scope: the same variables, looked up with those of their group."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as fc_v1
from tensorflow.python.feature_column import feature_column_v2 as fc_v2

from sok.compat.feature_column import grouping

GROUPED: dict[type, type] = {}
"""The class of a scope's columns, by the class that TensorFlow gives them."""


def _can_group(column: Any) -> bool:
    # Norms are clipped, and checkpoints read, by TensorFlow alone.
    return column.max_norm is None and getattr(column, "ckpt_to_load_from", None) is None


def _request(column: Any, sparse_tensors: Any, variable: Any) -> Any:
    # TensorFlow is safe also where it does not know that ids are a matrix.
    prunes = column.use_safe_embedding_lookup or sparse_tensors.id_tensor.shape.rank is None
    return grouping.request(variable, sparse_tensors, column.combiner, prunes, column.categorical_column)


class _InLayer:
    """How tf_keras' `DenseFeatures` asks a grouped column for its tensor; before TensorFlow's class among the bases."""

    def get_dense_tensor(self, transformation_cache: Any, state_manager: Any, training: Any = None) -> Any:
        if grouping.is_collecting():
            return super().get_dense_tensor(transformation_cache, state_manager)  # type: ignore[misc]
        return grouping.tensor_in_layer(self, transformation_cache, state_manager, training)


class GroupedEmbeddingColumn(_InLayer, fc_v2.EmbeddingColumn):
    """What `tf.feature_column.embedding_column` makes in a scope."""

    # Where both TensorFlow's old and its new way arrive with ids and variable at hand.
    def _get_dense_tensor_internal_helper(self, sparse_tensors: Any, embedding_weights: Any) -> Any:
        if grouping.is_collecting() and _can_group(self):
            request = _request(self, sparse_tensors, embedding_weights)
            if request is not None:
                return request
        return super()._get_dense_tensor_internal_helper(sparse_tensors, embedding_weights)


class GroupedSharedEmbeddingColumn(_InLayer, fc_v2.SharedEmbeddingColumn):
    """What `tf.feature_column.shared_embeddings` makes in a scope."""

    def _get_dense_tensor_internal(self, transformation_cache: Any, state_manager: Any) -> Any:
        if grouping.is_collecting() and _can_group(self):
            sparse_tensors = self.categorical_column.get_sparse_tensors(transformation_cache, state_manager)
            request = _request(self, sparse_tensors, self.shared_embedding_column_creator.embedding_weights)
            if request is not None:
                return request
        return super()._get_dense_tensor_internal(transformation_cache, state_manager)


class GroupedSharedEmbeddingColumnV1(fc_v1._SharedEmbeddingColumn):
    """What `tf.compat.v1.feature_column.shared_embedding_columns` makes in a scope."""

    def _get_dense_tensor_internal(self, inputs: Any, weight_collections: Any = None, trainable: Any = None) -> Any:
        if not grouping.is_collecting() or not _can_group(self):
            return super()._get_dense_tensor_internal(inputs, weight_collections, trainable)
        shared = tf.compat.v1.get_collection(self.shared_embedding_collection_name)
        if not shared:
            # Makes the variable, which the collection then holds. What is looked up here nobody runs.
            super()._get_dense_tensor_internal(inputs, weight_collections, trainable)
            shared = tf.compat.v1.get_collection(self.shared_embedding_collection_name)
        if len(shared) == 1:
            sparse_tensors = self.categorical_column._get_sparse_tensors(inputs, weight_collections, trainable)
            request = _request(self, sparse_tensors, shared[0])
            if request is not None:
                return request
        return super()._get_dense_tensor_internal(inputs, weight_collections, trainable)


# What is written of a model names TensorFlow's classes, so that it loads anywhere: there are no other weights in it.
for _plain, _grouped in (
    (fc_v2.EmbeddingColumn, GroupedEmbeddingColumn),
    (fc_v2.SharedEmbeddingColumn, GroupedSharedEmbeddingColumn),
    (fc_v1._SharedEmbeddingColumn, GroupedSharedEmbeddingColumnV1),
):
    _grouped.__name__ = _plain.__name__
    GROUPED[_plain] = _grouped
