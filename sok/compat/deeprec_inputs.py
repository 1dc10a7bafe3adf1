"""DeepRec's input layers of feature columns that TensorFlow 2 no longer has: those of `tf.contrib`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as fc_v1

from sok.base.types import Ids
from sok.compat.feature_column import sequences

if TYPE_CHECKING:
    from tensorflow.python.feature_column.feature_column_v2 import FeatureColumn

Features: TypeAlias = "Mapping[str | FeatureColumn, Ids]"
Columns: TypeAlias = "FeatureColumn | Iterable[FeatureColumn]"
Scope: TypeAlias = "str | tf.compat.v1.VariableScope | None"


def sequence_input_layer(
    features: Features,
    feature_columns: Columns,
    weight_collections: list[str] | None = None,
    trainable: bool = True,
    scope: Scope = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes the input of a network over sequences, of columns of sequences, in a v1 graph.

    `install()` puts it into `tf.contrib.feature_column`, beside `tf.feature_column.sequence_*`. Columns of a
    `sok.group_embedding_column_scope` are looked up with their group, if their rows are in tables.

    Args:
        features: the features [B, T] or [B, T, n] by their keys.
        feature_columns: embedding columns (also `sok.feature_column.embedding_column`) or indicator columns of
            `tf.feature_column.sequence_categorical_column_with_*`, and `tf.feature_column.sequence_numeric_column`.
        weight_collections: of the graph, to which variables are added besides the usual ones.
        trainable: whether variables and tables are trained.
        scope: variable scope, or its name. None: 'sequence_input_layer'.

    Returns:
        `input_layer`, float32 [B, T, D], the columns in the order of their names, where D is the sum of their widths;
        and `sequence_length`, int64 [B]. Zeros where a sequence has ended, and for ids that are left out.
        Differentiable in tables and variables.

    Raises:
        ValueError: no columns, one that is not of sequences, or two of one name.
        tf.errors.InvalidArgumentError: sequences of different lengths in one sample, when `sequence_length` is read.

    Collective if a column has a table.

    Example:
        >>> import sok
        >>> item = tf.feature_column.sequence_categorical_column_with_identity("item", 10)
        >>> column = sok.feature_column.embedding_column(item, 1, initializer="ones")
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     net, lengths = sequence_input_layer({"item": [[1, 2, 3], [4, -1, -1]]}, [column])
        ...     session.run([net[:, :, 0], lengths])
        [array([[1., 1., 1.],
               [1., 0., 0.]], dtype=float32), array([3, 1])]

    Source: `tf.contrib.feature_column.sequence_input_layer` of TensorFlow 1.15 and DeepRec.
    """
    called = "sequence_input_layer"
    net, lengths = sequences.sequence_layer(features, feature_columns, weight_collections, trainable, scope, called)
    message = "The columns of one sequence_input_layer must have sequences of the same lengths."
    same = [tf.compat.v1.assert_equal(lengths[0], other, message=message) for other in lengths[1:]]
    with tf.control_dependencies([check for check in same if check is not None]):
        return net, tf.identity(lengths[0])


def input_from_feature_columns(
    columns_to_tensors: Features,
    feature_columns: Columns,
    weight_collections: list[str] | None = None,
    trainable: bool = True,
    scope: Scope = None,
    cols_to_outs: dict[FeatureColumn, tf.Tensor] | None = None,
    blocknums: None = None,
) -> tf.Tensor:
    """Makes the input of a network, as `tf.compat.v1.feature_column.input_layer` under an older name.

    `install()` puts it into `tf.contrib.layers`. Its columns are those of `tf.feature_column`; the older ones of
    `tf.contrib.layers` are not there.

    Args:
        columns_to_tensors: the features by their keys.
        feature_columns: as `input_layer` takes them, also `sok.feature_column.embedding_column`.
        weight_collections: of the graph, to which variables are added besides the usual ones.
        trainable: whether variables and tables are trained.
        scope: variable scope, or its name. None: 'input_from_feature_columns'.
        cols_to_outs: None, or a dict that gets the tensor of each column.
        blocknums: must be None.

    Returns:
        float32 [B, D], the columns in the order of their names, where D is the sum of their widths. Differentiable in
        tables and variables.

    Raises:
        ValueError: no columns, or one that has no place in such a layer; `cols_to_outs` is no dict; `blocknums` is not
            None.

    Collective if a column has a table.

    Example:
        >>> import sok
        >>> item = tf.feature_column.categorical_column_with_identity("item", 10)
        >>> column = sok.feature_column.embedding_column(item, 2, initializer="ones")
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     session.run(input_from_feature_columns({"item": [[1, 2], [3, -1]]}, [column])).tolist()
        [[1.0, 1.0], [1.0, 1.0]]

    Source: `tf.contrib.layers.input_from_feature_columns` of TensorFlow 1.15 and DeepRec.
    """
    refuse_blocknums(blocknums)
    if cols_to_outs is not None and not isinstance(cols_to_outs, dict):
        raise ValueError(f"`cols_to_outs` must be None or a dict. Received: {cols_to_outs!r}.")
    called, values = "input_from_feature_columns", columns_to_tensors.values()
    with tf.compat.v1.variable_scope(scope, default_name=called, values=values):
        return fc_v1._internal_input_layer(
            columns_to_tensors,
            feature_columns,
            weight_collections,
            trainable,
            cols_to_output_tensors=cols_to_outs,
            from_template=True,  # it opens no scope of its own
        )


def sequence_input_from_feature_columns(
    columns_to_tensors: Features,
    feature_columns: Columns,
    weight_collections: list[str] | None = None,
    trainable: bool = True,
    scope: Scope = None,
) -> tf.Tensor:
    """Makes the input of a network over sequences, as `sequence_input_layer`, without their lengths.

    `install()` puts it into `tf.contrib.layers`.

    Args:
        columns_to_tensors: the features by their keys.
        feature_columns, weight_collections, trainable: as of `sequence_input_layer`.
        scope: variable scope, or its name. None: 'sequence_input_from_feature_columns'.

    Returns:
        float32 [B, T, D]. T is the same for all columns; lengths within a sample may differ.

    Raises:
        ValueError: no columns, one that is not of sequences, or two of one name.
        tf.errors.InvalidArgumentError: columns of different T. (ValueError, where it is known before the run.)

    Collective if a column has a table.

    Example:
        >>> import sok
        >>> item = tf.feature_column.sequence_categorical_column_with_identity("item", 10)
        >>> column = sok.feature_column.embedding_column(item, 1, initializer="ones")
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     net = sequence_input_from_feature_columns({"item": [[1, 2], [3, -1]]}, [column])
        ...     session.run(net).tolist()
        [[[1.0], [1.0]], [[1.0], [0.0]]]

    Source: `tf.contrib.layers.sequence_input_from_feature_columns` of TensorFlow 1.15 and DeepRec.
    """
    called, features = "sequence_input_from_feature_columns", columns_to_tensors
    return sequences.sequence_layer(features, feature_columns, weight_collections, trainable, scope, called)[0]


def refuse_blocknums(blocknums: object) -> None:
    """`ValueError` unless `blocknums` is None."""
    if blocknums is not None:
        raise ValueError(
            f"`blocknums` must be None: there are no dynamic-dimension variables. Received: {blocknums!r}."
        )
