"""A v1 script with v2 behaviour off that trains in a MonitoredTrainingSession and exports.

Run by test_export_session.py as a process, with the folder to write to. Prints what the model predicts.
"""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

import sok  # noqa: E402 (users switch first)

sok.Init(global_batch_size=2)
pooled = sok.DistributedEmbedding("mean", 100, 4, slot_num=2, max_nnz=3, name="pooled", embedding_initializer="normal")
sparse = tf.sparse_placeholder(tf.int64, shape=[None, 3])
ids = tf.placeholder(tf.int64, [None, 2])
matrix = tf.get_variable("matrix", [8, 1], use_resource=False)
plain = tf.get_variable("plain", [10, 1], use_resource=True)
words = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(np.array([1, 2]), np.array([5.0, 6.0])), 0.5)
(of_plain,) = sok.group_embedding_lookup_sparse([plain], [ids % 10], "sum")
(of_table,) = sok.group_embedding_lookup_sparse([pooled.embedding_variable], [ids], "sqrtn")
logits = tf.matmul(tf.reshape(pooled(sparse, training=True), [-1, 8]), matrix) + of_plain + of_table[:, :1]
logits += tf.cast(words.lookup(ids)[:, :1], tf.float32)
optimizer = sok.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1))
train = optimizer.minimize(tf.reduce_mean(logits**2))

feed = {sparse: tf.SparseTensorValue([[0, 0], [1, 0], [2, 0], [3, 1]], [1, 2, 3, -4], [4, 3]), ids: [[1, 2], [3, 4]]}
with tf.train.MonitoredTrainingSession() as session:
    for _ in range(3):
        session.run(train, feed)
    signatures = {"click": ({"pairs": sparse, "ids": ids}, {"logits": logits})}
    report = sok.export_saved_model(session, sys.argv[1], signatures=signatures, row_dtype="float32")
    assert tf.get_default_graph().finalized  # as it was
    # Afterwards: this graph's lookups make rows.
    predicted = session.run(logits, {**feed, ids: [[1, 77], [-9, 4]]})
print(*report.tables, sep="\n")
print("predicted", *predicted.ravel())
