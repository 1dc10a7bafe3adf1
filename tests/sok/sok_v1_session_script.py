"""A session as a user of SOK 1.1 and TensorFlow 1 writes it: run by test_sparse_operation_kit.py."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()

import sparse_operation_kit as sok  # noqa: E402 (users switch first)
from sparse_operation_kit.embeddings.distributed_embedding import DistributedEmbedding  # noqa: E402
from sparse_operation_kit.optimizers.utils import split_embedding_variable_from_others  # noqa: E402

GLOBAL_BATCH, SLOTS, DIM, VOCABULARY, STEPS, RATE = 8, 2, 4, 40, 4, 0.1

hvd.init()
sok_init_op = sok.Init(global_batch_size=GLOBAL_BATCH)
local_batch = GLOBAL_BATCH // hvd.size()

layer = DistributedEmbedding(
    "sum", VOCABULARY, DIM, slot_num=SLOTS, max_nnz=3, use_hashtable=False, embedding_initializer="ones"
)
ids = tf.sparse_placeholder(tf.int64, [None, None])
embedding = tf.reshape(layer(ids, training=True), [-1, SLOTS * DIM])
kernel = tf.get_variable("kernel", [SLOTS * DIM, 1], initializer=tf.ones_initializer(), use_resource=True)
loss = tf.reduce_sum(tf.matmul(embedding, kernel) ** 2) / GLOBAL_BATCH

emb_vars, other_vars = split_embedding_variable_from_others(tf.trainable_variables())
emb_grads, other_grads = tf.gradients(loss, emb_vars), tf.gradients(loss, other_vars)
optimizer = tf.train.GradientDescentOptimizer(RATE)
with sok.OptimizerScope(emb_vars):
    emb_train = optimizer.apply_gradients(zip(emb_grads, emb_vars))
with tf.control_dependencies([*emb_grads]):
    other_grads = [hvd.allreduce(grad, op=hvd.Sum) for grad in other_grads]
other_train = optimizer.apply_gradients(zip(other_grads, other_vars))
train_op = tf.group(emb_train, other_train)


def batch_of(step):
    rng = np.random.default_rng(step)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 4)).tolist() for _ in range(GLOBAL_BATCH * SLOTS)]


def sparse_of(rows):
    places = [[r, c] for r, row in enumerate(rows) for c in range(len(row))]
    return tf.SparseTensorValue(places, [i for row in rows for i in row], [len(rows), 3])


mine = slice(local_batch * SLOTS * hvd.rank(), local_batch * SLOTS * (hvd.rank() + 1))
with tf.Session() as session:
    session.run(sok_init_op)
    session.run(tf.global_variables_initializer())
    session.run(hvd.broadcast_global_variables(0))
    for step in range(STEPS):
        session.run(train_op, {ids: sparse_of(batch_of(step)[mine])})
    keys, rows = session.run(emb_vars[0].export())
    trained_kernel = session.run(kernel)

# The same by TensorFlow alone, on the whole batch.
table, dense = np.ones([VOCABULARY, DIM]), np.ones([SLOTS * DIM, 1])
for step in range(STEPS):
    batch = batch_of(step)
    pooled = np.array([table[row].sum(0) for row in batch]).reshape(GLOBAL_BATCH, -1)
    upstream = 2 * (pooled @ dense) / GLOBAL_BATCH
    of_rows = (upstream @ dense.T).reshape(-1, DIM)
    of_dense = pooled.T @ upstream
    for row, gradient in zip(batch, of_rows):
        np.subtract.at(table, row, RATE * gradient)
    dense -= RATE * of_dense
np.testing.assert_allclose(trained_kernel, dense, rtol=1e-4, atol=1e-5)
assert len(keys) and all(key % hvd.size() == hvd.rank() for key in keys)
np.testing.assert_allclose(rows, table[keys], rtol=1e-4, atol=1e-5)
print(f"rank {hvd.rank()}: the rows are those of TensorFlow", flush=True)
