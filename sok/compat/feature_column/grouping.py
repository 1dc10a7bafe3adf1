"""What a column of a group asks for, and how all that a group asks for in one layer is looked up at once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as fc_v1
from tensorflow.python.feature_column import feature_column_v2 as fc_v2

from sok.base.patching import Here
from sok.base.types import Training, Variable
from sok.lookup import group
from sok.lookup.feature import Feature
from sok.lookup.lookup import lookup_parts
from sok.lookup.plain_variables import as_plain_variable
from sok.table.table import EmbeddingVariable, is_embedding_variable

if TYPE_CHECKING:
    from tensorflow.python.feature_column import feature_column_v2


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The columns that were made in one scope. It is told from others by identity alone."""

    name: str | None
    params_num_per_group: int | None

    # The copy of a column belongs to the group of the column. Pickled, the columns of one pickle share a new one.
    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self


_collecting = Here()


def group_of(column: feature_column_v2.FeatureColumn) -> Group | None:
    """The group a column belongs to; None if it was made outside of every scope."""
    return getattr(column, "_sok_group", None)


def collecting() -> contextlib.AbstractContextManager[None]:
    """Inside, a grouped column that is asked for its tensor says what it would look up, if it can: a `Feature`."""
    return _collecting.inside(True)


def is_collecting() -> bool:
    return _collecting.value is not None


def request(
    param: EmbeddingVariable | Variable,
    sparse_tensors: feature_column_v2.CategoricalColumn.IdWeightPair,
    combiner: str,
    prunes: bool,
    categorical_column: feature_column_v2.CategoricalColumn,
) -> Feature | None:
    """The lookup of a column in `param`; None where only stock TensorFlow knows how.

    Args:
        param: a table, or a variable.
        sparse_tensors: ids and weights of the categorical column.
        combiner: of the column.
        prunes: whether ids below 0 and, unless the combiner is 'sum', weights that are not positive, are left out.
        categorical_column: where the ids come from.
    """
    ids, weights = sparse_tensors.id_tensor, sparse_tensors.weight_tensor
    variable = param if is_embedding_variable(param) else as_plain_variable(param)
    rank = ids.shape.rank
    if variable is None or rank not in (2, None) or combiner not in ("sum", "mean", "sqrtn"):
        return None
    if weights is not None:
        weights = at_places_of(ids, weights)
    if prunes and (weights is not None or _may_be_negative(categorical_column)):
        ids, weights = pruned(ids, weights, combiner)
    return Feature(variable, ids, combiner, weights, ids_called=categorical_column.name, weights_called="sp_weights")


def at_places_of(ids: tf.SparseTensor, weights: tf.SparseTensor) -> tf.SparseTensor:
    """The weights where the ids are: as TensorFlow does, which asks the weights for no indices of their own."""
    return tf.SparseTensor(ids.indices, weights.values, ids.dense_shape)


def pruned(
    ids: tf.SparseTensor, weights: tf.SparseTensor | None, combiner: str
) -> tuple[tf.SparseTensor, tf.SparseTensor | None]:
    """Both without the ids below 0 and, unless the combiner is 'sum', without those whose weight is not positive."""
    kept = ids.values >= 0
    if weights is not None and combiner != "sum":
        kept = tf.logical_and(kept, weights.values > 0)
    return tf.sparse.retain(ids, kept), None if weights is None else tf.sparse.retain(weights, kept)


def _may_be_negative(column: Any) -> bool:
    """Whether a categorical column may give ids below 0, which are those of no category."""
    weighted = (fc_v2.WeightedCategoricalColumn, fc_v1._WeightedCategoricalColumn)
    of_sequences = (fc_v2.SequenceCategoricalColumn, fc_v1._SequenceCategoricalColumn)
    if isinstance(column, weighted + of_sequences):
        return _may_be_negative(column.categorical_column)
    if isinstance(column, (fc_v2.HashedCategoricalColumn, fc_v2.CrossedColumn, fc_v2.BucketizedColumn)):
        return False
    if isinstance(column, (fc_v2.VocabularyListCategoricalColumn, fc_v2.VocabularyFileCategoricalColumn)):
        return column.default_value < 0 and not column.num_oov_buckets
    # An identity column without a default lets through what came.
    return not isinstance(column, fc_v2.IdentityCategoricalColumn) or column.default_value is None


def look_up(made: Sequence[tuple[Any, Any]], training: Training) -> dict[Any, tf.Tensor]:
    """The tensor of each column.

    Args:
        made: columns with what they said while collecting: a request, or the tensor itself.
        training: whether unseen ids of tables get a row.

    Returns:
        By column. Collective, with an exchange for each group (or part of it) that has a table.
    """
    tensors = {column: said for column, said in made if not isinstance(said, Feature)}
    by_group: dict[Group | None, list[tuple[Any, Feature]]] = {}
    for column, said in made:
        if isinstance(said, Feature):
            by_group.setdefault(group_of(column), []).append((column, said))
    parts = [
        (of_group, part)
        for of_group, members in by_group.items()
        for part in group.chunks(members, of_group.params_num_per_group if of_group else 1)
    ]
    names = [(of_group and of_group.name) or "group_embedding_columns" for of_group, _ in parts]
    outputs = lookup_parts([[said for _, said in part] for _, part in parts], training, names)
    for (_, part), of_part in zip(parts, outputs, strict=True):
        tensors.update({column: output for (column, _), output in zip(part, of_part, strict=True)})
    return tensors


def tensor_in_layer(
    column: feature_column_v2.FeatureColumn,
    cache: feature_column_v2.FeatureTransformationCache,
    state_manager: feature_column_v2.StateManager,
    training: Training,
) -> tf.Tensor:
    """The tensor of a grouped column in a `DenseFeatures` layer, looked up with the rest of its group there.

    Args:
        column: of the layer.
        cache: of the layer's call; where the group's tensors wait for their turn.
        state_manager: of the layer.
        training: of the layer's call: a bool, NumPy's or a tensor. None means True, and so does 0, which a layer that
            is called by hand says if nobody said anything.
    """
    waiting = cache.__dict__.setdefault("_sok_tensors", {})
    key = (id(state_manager), column)
    if key not in waiting:
        layer = getattr(state_manager, "_layer", None)
        columns = getattr(layer, "_feature_columns", None) or [column]
        members = [c for c in columns if group_of(c) is not None and group_of(c) is group_of(column)] or [column]
        with collecting():
            made = [(c, c.get_dense_tensor(cache, state_manager)) for c in members]
        for member, tensor in look_up(made, makes_rows(training)).items():
            waiting[id(state_manager), member] = tensor
    return waiting[key]


def makes_rows(training: Training) -> Training:
    """What a layer's `training` means for the lookups in it: see `tensor_in_layer`."""
    is_unsaid = training is None or (isinstance(training, int) and not isinstance(training, bool))
    return True if is_unsaid else training
