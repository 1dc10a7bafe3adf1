"""A SOK v1 script as of TensorFlow 1, by tf.compat.v1 with v2 behaviour off: run by test_v1_scripts.py as a process."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior() if sys.argv[1] == "v2 behaviour off" else tf.disable_eager_execution()

import sok  # noqa: E402 (users switch first)

init = sok.Init(global_batch_size=4)
layer = sok.DistributedEmbedding("sum", 100, 4, slot_num=2, max_nnz=3, name="pooled")
fixed = sok.All2AllDenseEmbedding(100, 4, slot_num=2, nnz_per_slot=1, name="fixed")
assert sok.get_embedding("named", lambda name: layer) is sok.get_embedding("named") is layer

known = tf.placeholder(tf.int64, [None, 2])
unknown = tf.placeholder(tf.int64, [None, None])
cube = tf.placeholder(tf.int64, [None, None, None])
sparse = tf.sparse_placeholder(tf.int64)
ragged = tf.ragged.placeholder(tf.int64, 2)
pooled = [layer(x, training=True) for x in (known, unknown, cube, sparse, ragged)]
rows = [fixed(x, training=True) for x in (known, unknown, cube)]
assert [x.shape.as_list() for x in pooled] == [[None, 2, 4]] * 5
assert [x.shape.as_list() for x in rows] == [[None, 2, 1, 4]] * 3
assert all(x.dtype == tf.float32 for x in pooled + rows)
tables, others = sok.split_embedding_variable_from_others(tf.trainable_variables())
assert (tables, others) == ((layer.embedding_variable, fixed.embedding_variable), ())

weights = tf.get_variable("weights", [8, 1], initializer=tf.ones_initializer())
loss = tf.reduce_sum(tf.matmul(tf.reshape(pooled[0], [-1, 8]), weights))
of_table, of_weights = tf.gradients(loss, [layer.embedding_variable, weights])
train = [
    sok.optimizers.SGD(0.5).apply_gradients([(of_table, layer.embedding_variable)]),
    tf.train.GradientDescentOptimizer(0.0).apply_gradients([(of_weights, weights)]),
]
read = layer.embedding_variable.sparse_read(np.array([1, 2, 3, 4]))

ids = [[1, 2], [3, 4]]
feed = {
    known: ids,
    unknown: ids,
    cube: [[[1], [2]], [[3], [4]]],
    sparse: tf.SparseTensorValue([[0, 0], [1, 0], [2, 0], [3, 0]], [1, 2, 3, 4], [4, 3]),
    ragged: tf.ragged.constant_value([[[1], [2]], [[3], [4]]]),
}
with tf.Session() as session:
    assert session.run(init) == b"OK"
    session.run(tf.global_variables_initializer())
    before = session.run(read)
    for out in session.run(pooled, feed):
        np.testing.assert_array_equal(out, before.reshape(2, 2, 4))
    for out in session.run(rows, feed):
        np.testing.assert_array_equal(out, session.run(fixed.var.sparse_read(ids))[:, :, None])
    session.run(train, feed)
    np.testing.assert_allclose(session.run(read), before - 0.5, rtol=1e-6)
    assert session.run(layer.embedding_variable.size()) == 4
    try:
        session.run(pooled[2], {cube: [[[1]]]})
    except tf.errors.InvalidArgumentError as error:
        assert "slot_num = 2 features. Received: 1" in str(error)
    else:
        raise AssertionError("a sample with one feature of two went through")
print("the script ran to its end")
