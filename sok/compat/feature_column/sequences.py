"""Columns of sequences: ids [B, T, n] become vectors [B, T, D], looked up as one feature of B * T samples.

A sample without an id (the end of a shorter sequence, or an id that is left out) is zeros, and stays at its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as fc_v1
from tensorflow.python.feature_column import feature_column_v2 as fc_v2

from sok.base.types import Ids
from sok.compat.feature_column import grouping
from sok.compat.feature_column.input_layer import with_usual_collections
from sok.lookup.feature import Feature
from sok.table.table import EmbeddingVariable

if TYPE_CHECKING:
    from tensorflow.python.feature_column import feature_column_v2

CATEGORICAL = (fc_v2.SequenceCategoricalColumn, fc_v1._SequenceCategoricalColumn)
"""Classes of the categorical columns of sequences."""


class Asked(NamedTuple):
    """What a column of sequences would look up."""

    feature: Feature  # of B * T samples
    steps: tf.Tensor  # [2] int64: B and T

    def shaped(self, pooled: tf.Tensor) -> tf.Tensor:
        """[B * T, D] as [B, T, D]."""
        dim = pooled.shape[-1]
        vectors = tf.reshape(pooled, tf.concat([self.steps, tf.constant([dim], tf.int64)], 0))
        vectors.set_shape([None, None, dim])
        return vectors


def ask(
    table: EmbeddingVariable,
    sparse_tensors: feature_column_v2.CategoricalColumn.IdWeightPair,
    combiner: str,
    prunes: bool,
    categorical_column: feature_column_v2.CategoricalColumn,
) -> Asked:
    """The lookup of a column, whose categorical column gives ids [B, T, n], in `table`; as `grouping.request`."""
    ids = sparse_tensors.id_tensor
    steps = ids.dense_shape[:2]
    flat = tf.sparse.reshape(ids, tf.stack([tf.reduce_prod(steps), ids.dense_shape[2]]))
    pair = fc_v2.CategoricalColumn.IdWeightPair(flat, sparse_tensors.weight_tensor)
    feature = grouping.request(table, pair, combiner, prunes, categorical_column)
    assert feature is not None  # a table, ids of rank 2, and a combiner that was checked
    return Asked(feature, steps)


def sequence_layer(
    features: Mapping[str | feature_column_v2.FeatureColumn, Ids],
    feature_columns: feature_column_v2.FeatureColumn | Iterable[feature_column_v2.FeatureColumn],
    weight_collections: list[str] | None,
    trainable: bool,
    scope: str | tf.compat.v1.VariableScope | None,
    called: str,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Vectors [B, T, D], D the sum over all columns, in the order of their names; and each column's lengths [B].

    Args:
        features, feature_columns, weight_collections, trainable, scope: as of `sok.deeprec.sequence_input_layer`.
        called: the scope, if `scope` is None.
    """
    columns = _checked(feature_columns)
    collections = with_usual_collections(weight_collections)
    builder, cache = fc_v1._LazyBuilder(features), fc_v2.FeatureTransformationCache(features)
    with tf.compat.v1.variable_scope(scope, default_name=called, values=features.values()):
        made, lengths = [], []
        for column in columns:
            called = getattr(column, "_var_scope_name", column.name)
            collects = grouping.collecting() if grouping.group_of(column) else contextlib.nullcontext()
            with tf.compat.v1.variable_scope(None, default_name=called), collects:
                if isinstance(column, fc_v1._SequenceDenseColumn):
                    pair = column._get_sequence_dense_tensor(
                        builder, weight_collections=collections, trainable=trainable
                    )
                else:  # of numbers: it makes no variables
                    pair = column.get_sequence_dense_tensor(cache, None)
            made.append((column, pair.dense_tensor))
            lengths.append(pair.sequence_length)
        asked = [(c, said.feature if isinstance(said, Asked) else said) for c, said in made]
        tensors = grouping.look_up(asked, training=True)
        outputs = []
        for column, said in made:
            vectors = said.shaped(tensors[column]) if isinstance(said, Asked) else tensors[column]
            is_new = getattr(column, "_is_v2_column", True)
            width = (column.variable_shape if is_new else column._variable_shape).num_elements()
            outputs.append(tf.reshape(vectors, [tf.shape(vectors)[0], tf.shape(vectors)[1], width]))
        fc_v1._verify_static_batch_size_equality(outputs, columns)
        return tf.concat(outputs, 2), lengths


def _checked(feature_columns: Any) -> list[Any]:
    """The columns, in the order of their names."""
    kinds = (fc_v1._SequenceDenseColumn, fc_v2.SequenceDenseColumn)
    columns = [feature_columns] if isinstance(feature_columns, kinds) else list(feature_columns)
    for column in columns:
        if not isinstance(column, kinds):
            raise ValueError(
                "`feature_columns` must be of sequences: tf.feature_column.embedding_column or indicator_column of a "
                "tf.feature_column.sequence_categorical_column_with_*, or tf.feature_column.sequence_numeric_column. "
                f"Received: {column!r}."
            )
    names = [column.name for column in columns]
    if not columns or len(set(names)) < len(names):
        raise ValueError(f"`feature_columns` must be columns of different names, at least one. Received: {columns!r}.")
    return sorted(columns, key=lambda column: column.name)
