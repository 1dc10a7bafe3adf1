"""A categorical column of any ids, which DeepRec has: its embeddings are in a table, whose size nobody says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2 as fc_v2
from tensorflow.python.feature_column import serialization

from sok.base.errors import refuse_strings

if TYPE_CHECKING:
    from tensorflow.python.feature_column import feature_column_v2


@serialization.register_feature_column
class AnyIdColumn(fc_v2.IdentityCategoricalColumn):
    """Integer ids as they come. `number_buckets`, of the class that it is made of, is the capacity of a worker."""

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
