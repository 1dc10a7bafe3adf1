"""Feature columns whose embeddings are looked up together, and an embedding column whose rows are in a table of ours.

with sok.group_embedding_column_scope():
    columns = [tf.feature_column.embedding_column(c, 16) for c in categorical_columns]
net = tf.compat.v1.feature_column.input_layer(features, columns)
"""

from sok.compat.feature_column.input_layer import uninstall
from sok.compat.feature_column.scope import group_embedding_column_scope
from sok.compat.feature_column.table_column import embedding_column

__all__ = ["embedding_column", "group_embedding_column_scope", "uninstall"]
