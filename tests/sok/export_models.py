"""What several tests export."""

import tensorflow as tf

import sok


def ids_spec(dtype=tf.int64, name="ids"):
    return tf.TensorSpec([None, None], dtype, name)


class Rows(tf.Module):
    """The rows of each id."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def __call__(self, ids):
        return sok.group_embedding_lookup([self.table], [ids], training=False)[0]
