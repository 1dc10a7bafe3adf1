"""A categorical column of any ids, which DeepRec has: its embeddings are in a table, whose size nobody says."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2 as fc_v2
from tensorflow.python.feature_column import serialization

from sok.base.errors import refuse_strings
from sok.table.policies import Admission, Eviction, as_admission, as_eviction
from sok.table.storage import Storage, as_storage

if TYPE_CHECKING:
    from tensorflow.python.feature_column import feature_column_v2


@serialization.register_feature_column
class AnyIdColumn(fc_v2.IdentityCategoricalColumn):
    """Integer ids as they come. `number_buckets`, of the class that it is made of, is the capacity of a worker."""

    _fields = (*fc_v2.IdentityCategoricalColumn._fields, "admission", "eviction", "storage")
    admission = property(operator.itemgetter(3), doc="When an id gets a row; None: at once.")
    eviction = property(operator.itemgetter(4), doc="When a row leaves; None: never.")
    storage = property(operator.itemgetter(5), doc="Where rows lie; None: in memory.")

    def __new__(
        cls,
        key: str,
        number_buckets: int,
        default_value: None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        storage: Storage | None = None,
    ) -> AnyIdColumn:
        # A tuple of more than its class knows: that one compares, hashes and pickles what the tuple has.
        return tuple.__new__(cls, (key, number_buckets, default_value, admission, eviction, storage))

    def get_config(self) -> dict[str, Any]:
        config = dict(zip(self._fields, self, strict=True))
        return {name: value.get_config() if hasattr(value, "get_config") else value for name, value in config.items()}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: object = None, columns_by_name: object = None
    ) -> AnyIdColumn:
        makers = {"admission": as_admission, "eviction": as_eviction, "storage": as_storage}
        return cls(**{**config, **{name: make(config.get(name)) for name, make in makers.items()}})

    def _transform_input_tensor(self, input_tensor: tf.SparseTensor) -> tf.SparseTensor:
        refuse_strings(input_tensor.dtype, f"column '{self.key}'")
        return super()._transform_input_tensor(input_tensor)

    @property
    def num_buckets(self) -> int:
        # A stock embedding column would make a matrix of so many rows.
        raise ValueError(
            f"Column '{self.key}' has no number of buckets: its embeddings are in a table. Make them by "
            "sok.feature_column.embedding_column, or call sok.deeprec.install(), after which "
            "tf.feature_column.embedding_column does."
        )


def capacity_of(column: feature_column_v2.FeatureColumn) -> int | None:
    """Rows for each worker's part of a table of this column, or of the one that it weighs; None: it knows its ids."""
    column = getattr(column, "categorical_column", column)
    return column.number_buckets if isinstance(column, AnyIdColumn) else None


def policies_of(column: feature_column_v2.FeatureColumn) -> dict[str, Any]:
    """`admission`, `eviction` and `storage` of a table of this column, or of the one that it weighs; None: nothing was
    said."""
    column = getattr(column, "categorical_column", column)
    is_ours = isinstance(column, AnyIdColumn)
    return {name: getattr(column, name) if is_ours else None for name in ("admission", "eviction", "storage")}
