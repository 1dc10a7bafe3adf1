"""`sok.feature_column.embedding_column` over columns of sequences, in tf_keras' SequenceFeatures."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.messages import saying

fc = tf.feature_column
pytestmark = pytest.mark.usefixtures("feature_columns")
ROWS = np.random.default_rng(3).normal(size=[10, 3]).astype(np.float32)
IDS = tf.SparseTensor(
    [[0, 0], [0, 1], [0, 2], [1, 0], [3, 0], [3, 1]], tf.constant([1, 2, 1, 3, -1, 4], tf.int64), [4, 3]
)


def item():
    return fc.sequence_categorical_column_with_identity("item", 10)


@pytest.mark.parametrize("grouped", [False, True])
def test_sequences_are_those_of_tensorflow(grouped):
    stock = tf_keras.experimental.SequenceFeatures([fc.embedding_column(item(), 3)])
    stock({"item": IDS})
    stock.set_weights([ROWS])
    expected, lengths = stock({"item": IDS})
    if grouped:
        with sok.group_embedding_column_scope():
            column = sok.feature_column.embedding_column(item(), 3)
    else:
        column = sok.feature_column.embedding_column(item(), 3)
    layer = tf_keras.experimental.SequenceFeatures([column])
    layer({"item": IDS}, training=False)
    (table,) = layer.trainable_variables
    assert int(table.size()) == 0
    table.assign(tf.range(10, dtype=tf.int64), ROWS)
    with tf.GradientTape() as tape:
        found, of_ours = layer({"item": IDS})
        loss = tf.reduce_sum(found**2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert of_ours.numpy().tolist() == lengths.numpy().tolist() == [3, 1, 0, 2]
    sok.optimizers.SGD(0.5).apply_gradients([(tape.gradient(loss, table), table)])
    times = np.array([0, 2, 1, 1, 1, 0, 0, 0, 0, 0])[:, None]
    np.testing.assert_allclose(table.sparse_read(tf.range(10, dtype=tf.int64)), ROWS * (1 - times), atol=1e-6)


def test_columns_have_their_layers():
    of_sequences = sok.feature_column.embedding_column(item(), 2)
    parts = ("'item_embedding'", "sequence_input_layer", "SequenceFeatures", "Received: Sequence")
    with pytest.raises(ValueError, match=saying(*parts)):
        tf_keras.layers.DenseFeatures([of_sequences])({"item": IDS})
    with tf.Graph().as_default(), pytest.raises(ValueError, match=saying(*parts)):
        tf.compat.v1.feature_column.input_layer({"item": [[1]]}, [of_sequences])
    flat = sok.feature_column.embedding_column(fc.categorical_column_with_identity("item", 10), 2)
    with pytest.raises(ValueError, match=saying("'item_embedding'", "sequence_", "Received: Identity")):
        tf_keras.experimental.SequenceFeatures([flat])({"item": IDS})


def test_columns_of_sequences_are_written_and_read():
    column = sok.feature_column.embedding_column(item(), 2)
    layer = tf_keras.experimental.SequenceFeatures([column])
    assert type(layer).from_config(layer.get_config())._feature_columns == [column]
