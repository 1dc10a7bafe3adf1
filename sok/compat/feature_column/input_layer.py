"""What `tf.compat.v1.feature_column.input_layer` calls, for columns of which some are grouped.

TensorFlow's own asks a column for its tensor before it makes the variables of the next one, so a group cannot be looked
up as one there. This one first lets all columns make their variables, in TensorFlow's order and scopes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as fc_v1

from sok.base.patching import Patch
from sok.compat.feature_column import grouping
from sok.lookup.feature import Feature


def install() -> None:
    """Lets `input_layer` look groups up. Doing it again does nothing."""
    _patch.install()


def uninstall() -> None:
    """Gives `tf.compat.v1.feature_column.input_layer` back what it had: grouped columns are looked up one by one there.

    The next `sok.group_embedding_column_scope` installs it anew. Does nothing where there is nothing to take back.

    Example:
        >>> import sok
        >>> sok.feature_column.uninstall()
    """
    _patch.uninstall()


def _input_layer(
    original: Any,  # TensorFlow's own
    features: Any,
    feature_columns: Any,
    weight_collections: Any = None,
    trainable: bool = True,
    cols_to_vars: Any = None,
    scope: Any = None,
    cols_to_output_tensors: Any = None,
    from_template: bool = False,
) -> tf.Tensor:
    columns = fc_v1._normalize_feature_columns(feature_columns)
    is_ours = any(grouping.group_of(c) for c in columns) and all(isinstance(c, fc_v1._DenseColumn) for c in columns)
    if not is_ours:
        options = {"from_template": from_template, "scope": scope, "cols_to_output_tensors": cols_to_output_tensors}
        return original(features, columns, weight_collections, trainable, cols_to_vars, **options)
    collections = with_usual_collections(weight_collections)
    outer = (
        contextlib.nullcontext()
        if from_template
        else tf.compat.v1.variable_scope(scope, default_name="input_layer", values=features.values())
    )
    with outer:
        columns = sorted(columns, key=lambda column: column.name)
        made = _collect(fc_v1._LazyBuilder(features), columns, collections, trainable, cols_to_vars)
        tensors = grouping.look_up(made, training=True)
        outputs = []
        for column in columns:
            width = _of(column, "variable_shape").num_elements()
            output = tf.reshape(tensors[column], [tf.shape(tensors[column])[0], width])
            if cols_to_output_tensors is not None:
                cols_to_output_tensors[column] = output
            outputs.append(output)
        fc_v1._verify_static_batch_size_equality(outputs, columns)
        return tf.concat(outputs, 1)


def with_usual_collections(weight_collections: Sequence[str] | None) -> list[str]:
    """The collections, with the two in which TensorFlow's layers of columns have their variables besides."""
    keys = tf.compat.v1.GraphKeys
    collections = list(weight_collections or [])
    return collections + [key for key in (keys.GLOBAL_VARIABLES, keys.MODEL_VARIABLES) if key not in collections]


def _collect(
    builder: Any, columns: list[Any], collections: list[str], trainable: bool, cols_to_vars: Any
) -> list[tuple[Any, Any]]:
    """Each column with its tensor or, grouped, with its request; and its variables in `cols_to_vars`, if given."""
    made = []
    for column in columns:
        with tf.compat.v1.variable_scope(None, default_name=column._var_scope_name) as scope:
            collects = grouping.collecting() if grouping.group_of(column) else contextlib.nullcontext()
            with collects:
                said = column._get_dense_tensor(builder, weight_collections=collections, trainable=trainable)
            made.append((column, said))
            if cols_to_vars is not None:
                cols_to_vars[column] = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, scope.name)
                if isinstance(said, Feature) and said.is_of_table:
                    cols_to_vars[column].append(said.table)
    return made


def _of(column: Any, what: str) -> Any:
    # TensorFlow's new columns warn where their old names are used.
    return getattr(column, what) if getattr(column, "_is_v2_column", False) else getattr(column, f"_{what}")


_patch = Patch(lambda: [(fc_v1, "_internal_input_layer", lambda own: functools.partial(_input_layer, own))])
