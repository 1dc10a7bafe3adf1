"""`sok.feature_column.embedding_column`: TensorFlow's embedding column, with its rows in a table of ours."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as fc_v1
from tensorflow.python.feature_column import feature_column_v2 as fc_v2
from tensorflow.python.feature_column import serialization
from tensorflow.python.feature_column.utils import sequence_length_from_sparse_tensor

from sok.base.types import DTypeLike, Training
from sok.compat.feature_column import grouping, scope, sequences
from sok.compat.feature_column.id_column import capacity_of, policies_of
from sok.compat.scoped_tables import scoped_table
from sok.job import context
from sok.lookup.feature import check_combiner
from sok.table.initializers import Initializer
from sok.table.options import TableOptions, said_once, whole_number
from sok.table.placement import Placement
from sok.table.table import EmbeddingVariable

if TYPE_CHECKING:
    from tensorflow.python.feature_column import feature_column_v2

_TABLE = "embedding_weights"


class _Fields(NamedTuple):
    categorical_column: Any
    dimension: int
    combiner: str
    prunes: bool
    capacity: int | None
    table: TableOptions


def embedding_column(
    categorical_column: feature_column_v2.CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer | None = None,
    ckpt_to_load_from: None = None,
    tensor_name_in_ckpt: None = None,
    max_norm: None = None,
    trainable: bool = True,
    use_safe_embedding_lookup: bool = True,
    *,
    capacity: int | None = None,
    exchange_dtype: DTypeLike | None = None,
    placement: Placement | None = None,
    table: TableOptions | None = None,
) -> TableEmbeddingColumn:
    """Makes a dense column of embeddings that lie in a table of ours, spread over all workers.

    It does what `tf.feature_column.embedding_column` does, except that its rows are in a table, and start from the same
    values on any number of workers. For `tf.compat.v1.feature_column.input_layer` and tf_keras' `DenseFeatures`; in a
    `sok.group_embedding_column_scope` it is looked up with its group. Over a
    `tf.feature_column.sequence_categorical_column_with_*` it is for `sok.deeprec.sequence_input_layer` and tf_keras'
    `SequenceFeatures`.

    A layer makes its own table; `input_layer` one for each variable scope, shared where the scope reuses variables.
    `input_layer` makes rows for ids that it has not seen, and so does `DenseFeatures` unless called with
    `training=False`, as `evaluate` and `predict` do.

    Args:
        categorical_column: where the ids come from.
        dimension: length of a row.
        combiner: 'sum', 'mean' or 'sqrtn', in any capitalisation.
        initializer: as `EmbeddingVariable` takes it. None: truncated normal with deviation 1 / sqrt(dimension).
        ckpt_to_load_from, tensor_name_in_ckpt, max_norm: here for TensorFlow's signature; must be None.
        trainable: whether the table is trained.
        use_safe_embedding_lookup: whether ids below 0 and, unless the combiner is 'sum', weights that are not positive,
            are left out. Without, weights of any sign count by tf.nn's rule, and an id below 0 is an error, or with
            `capacity` an id like any other. A sample without ids is zeros in either case.
        capacity: rows that each worker's part of the table may hold, as they appear. None: all that the categorical
            column has (`num_buckets`), each with its place; for DeepRec's columns of any ids, what these say.
        exchange_dtype, placement: as `sok.TableOptions` takes them. `sok.row_wise(hash=True)` needs `capacity`.
        table: all properties of the table, instead of initializer, trainable, exchange_dtype and placement;
            whether it is hashed, and its num_keys, says the column.

    Returns:
        The column. Looking it up is collective.

    Raises:
        ValueError: an argument is not what it should be.

    Example:
        >>> import sok, tensorflow as tf
        >>> item = tf.feature_column.categorical_column_with_identity("item", 10)
        >>> column = sok.feature_column.embedding_column(item, 4, initializer="ones")
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     net = tf.compat.v1.feature_column.input_layer({"item": [[1, 2], [2, 2]]}, [column])
        ...     session.run(net).tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]

    Source: `tf.feature_column.embedding_column`; DeepRec's columns with an EmbeddingVariable.
    """
    if not isinstance(categorical_column, fc_v2.CategoricalColumn):
        raise ValueError(
            "`categorical_column` must be one of tf.feature_column.categorical_column_with_*, or made of them. "
            f"Received: {categorical_column!r}."
        )
    refused = {"ckpt_to_load_from": ckpt_to_load_from, "tensor_name_in_ckpt": tensor_name_in_ckpt, "max_norm": max_norm}
    for argument, value in refused.items():
        if value is not None:
            raise ValueError(f"`{argument}` must be None: a table knows nothing of it. Received: {value!r}.")
    capacity = capacity_of(categorical_column) if capacity is None else whole_number("capacity", capacity)
    options = said_once(
        table,
        own=("hashed", "num_keys"),
        initializer=initializer,
        trainable=None if trainable else False,
        exchange_dtype=exchange_dtype,
        placement=placement,
        **policies_of(categorical_column),
    )
    group = scope.current_group()
    column_class = TableEmbeddingColumn if group is None else scope.in_group(TableEmbeddingColumn, group)
    return column_class(
        categorical_column,
        whole_number("dimension", dimension),
        check_combiner(combiner),
        bool(use_safe_embedding_lookup),
        capacity,
        dataclasses.replace(options, hashed=capacity is not None),
    )


@serialization.register_feature_column
class TableEmbeddingColumn(
    fc_v2.DenseColumn, fc_v2.SequenceDenseColumn, fc_v1._DenseColumn, fc_v1._SequenceDenseColumn, _Fields
):
    """See `embedding_column`. A tuple of what it is made of, as TensorFlow's columns are."""

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_embedding"

    @property
    def variable_shape(self) -> tf.TensorShape:
        return tf.TensorShape([self.dimension])

    @property
    def parse_example_spec(self) -> Any:
        return self.categorical_column.parse_example_spec

    @property
    def parents(self) -> list[Any]:
        return [self.categorical_column]

    @property
    def _is_v2_column(self) -> bool:
        return True

    # In tf_keras' DenseFeatures.

    def transform_feature(
        self,
        transformation_cache: feature_column_v2.FeatureTransformationCache,
        state_manager: feature_column_v2.StateManager,
    ) -> Any:
        return transformation_cache.get(self.categorical_column, state_manager)

    def create_state(self, state_manager: feature_column_v2.StateManager) -> None:
        layer = state_manager._layer
        table = EmbeddingVariable(name=f"{layer.name}/{self.name}/{_TABLE}", **self._options(layer.trainable))
        state_manager.add_resource(self, _TABLE, table)
        # As an attribute Keras finds it among the weights of the layer.
        setattr(layer, f"_sok_{self.name}", table)

    def get_dense_tensor(
        self,
        transformation_cache: feature_column_v2.FeatureTransformationCache,
        state_manager: feature_column_v2.StateManager,
        training: Training = None,
    ) -> Any:
        self._check_is_of_sequences(False)
        if not grouping.is_collecting():
            return grouping.tensor_in_layer(self, transformation_cache, state_manager, training)
        sparse_tensors = self.categorical_column.get_sparse_tensors(transformation_cache, state_manager)
        return self._request(sparse_tensors, state_manager.get_resource(self, _TABLE))

    # In tf_keras' SequenceFeatures.

    def get_sequence_dense_tensor(
        self,
        transformation_cache: feature_column_v2.FeatureTransformationCache,
        state_manager: feature_column_v2.StateManager,
        training: Training = None,
    ) -> Any:
        self._check_is_of_sequences(True)
        sparse_tensors = self.categorical_column.get_sparse_tensors(transformation_cache, state_manager)
        table = state_manager.get_resource(self, _TABLE)
        return self._sequences(sparse_tensors, table, grouping.makes_rows(training))

    # In tf.compat.v1.feature_column.input_layer.

    @property
    def _variable_shape(self) -> tf.TensorShape:
        return self.variable_shape

    @property
    def _parse_example_spec(self) -> Any:
        return self.categorical_column.parse_example_spec

    def _transform_feature(self, inputs: Any) -> Any:
        return inputs.get(self.categorical_column)

    def _get_dense_tensor(self, inputs: Any, weight_collections: Any = None, trainable: Any = None) -> Any:
        self._check_is_of_sequences(False)
        sparse_tensors = self.categorical_column._get_sparse_tensors(inputs, weight_collections, trainable)
        request = self._request(sparse_tensors, scoped_table(_TABLE, **self._options(trainable is not False)))
        return request if grouping.is_collecting() else grouping.look_up([(self, request)], True)[self]

    # In sok.deeprec.sequence_input_layer.

    def _get_sequence_dense_tensor(self, inputs: Any, weight_collections: Any = None, trainable: Any = None) -> Any:
        self._check_is_of_sequences(True)
        sparse_tensors = self.categorical_column._get_sparse_tensors(inputs, weight_collections, trainable)
        return self._sequences(sparse_tensors, scoped_table(_TABLE, **self._options(trainable is not False)), True)

    def _sequences(self, sparse_tensors: Any, table: EmbeddingVariable, training: Training) -> Any:
        asked = sequences.ask(table, sparse_tensors, self.combiner, self.prunes, self.categorical_column)
        lengths = sequence_length_from_sparse_tensor(sparse_tensors.id_tensor)
        said: Any = asked
        if not grouping.is_collecting():
            said = asked.shaped(grouping.look_up([(self, asked.feature)], training)[self])
        return fc_v2.SequenceDenseColumn.TensorSequenceLengthPair(said, lengths)

    def _check_is_of_sequences(self, wanted: bool) -> None:
        if isinstance(self.categorical_column, sequences.CATEGORICAL) == wanted:
            return
        raise ValueError(
            f"Column '{self.name}': `categorical_column` must be one of "
            + (
                "tf.feature_column.sequence_categorical_column_with_*, as this layer is of sequences."
                if wanted
                else "tf.feature_column.categorical_column_with_*; sok.deeprec.sequence_input_layer and "
                "tf_keras.experimental.SequenceFeatures are for sequences."
            )
            + f" Received: {self.categorical_column!r}."
        )

    def _options(self, layer_trains: bool) -> dict[str, Any]:
        options = self.table
        if options.initializer is None:
            normal = tf.compat.v1.truncated_normal_initializer(stddev=1 / math.sqrt(self.dimension))
            options = dataclasses.replace(options, initializer=normal)
        # Places for all ids of the categorical column, split evenly, unless ids are to be kept as they come.
        capacity, num_ids = self.capacity, None
        if capacity is None:
            num_ids = self.categorical_column.num_buckets
            capacity = options.placement.share(num_ids, context.size())
        return {
            "dim": self.dimension,
            "capacity": capacity,
            "options": dataclasses.replace(options, num_keys=num_ids, trainable=options.trainable and layer_trains),
        }

    def _request(self, sparse_tensors: Any, table: EmbeddingVariable) -> Any:
        request = grouping.request(table, sparse_tensors, self.combiner, self.prunes, self.categorical_column)
        if request is None:
            raise ValueError(
                f"Column '{self.name}': the ids of a sample must be a list, so the feature [batch, n]. Received: shape "
                f"{sparse_tensors.id_tensor.shape}."
            )
        return request

    # For models that are saved.

    def get_config(self) -> dict[str, Any]:
        config = self._asdict()
        config["categorical_column"] = serialization.serialize_feature_column(self.categorical_column)
        config["table"] = self.table.get_config()
        return config

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
        columns_by_name: dict[str, Any] | None = None,
    ) -> TableEmbeddingColumn:
        fields = dict(config)
        fields["categorical_column"] = serialization.deserialize_feature_column(
            config["categorical_column"], custom_objects, columns_by_name
        )
        if "table" not in fields:  # of before there was one
            of_table = ("initializer", "trainable", "exchange_dtype", "placement")
            fields["table"] = {name: fields.pop(name) for name in of_table if name in fields}
            fields["table"]["hashed"] = fields["capacity"] is not None
        # Of the initializers of TensorFlow 1 the one that Keras does not have.
        scaling = {"UniformUnitScaling": tf.compat.v1.uniform_unit_scaling_initializer}
        with tf.keras.utils.custom_object_scope(scaling | (custom_objects or {})):
            fields["table"] = TableOptions.from_config(fields["table"])
        return cls(**fields)
