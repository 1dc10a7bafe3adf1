"""A session as a user of SOK 2.1 and TensorFlow 1 writes it: run by test_sparse_operation_kit.py."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

from sparse_operation_kit import experiment as sok  # noqa: E402 (users switch first)

hvd.init()
sok.init()

rows, cols, batch_size, iters, rate = [21, 10], [4, 3], 8, 4, 0.25
combiners = ["mean", "sum"]
rng = np.random.default_rng(0)
weights = [rng.random([r, c]).astype(np.float32) for r, c in zip(rows, cols)]
sok_vars = [sok.Variable(w) for w in weights]

values = [tf.placeholder(tf.int64, [None]) for _ in rows]
lengths = [tf.placeholder(tf.int64, [None]) for _ in rows]
indices = [tf.RaggedTensor.from_row_lengths(v, n) for v, n in zip(values, lengths)]
embeddings = sok.lookup_sparse(sok_vars, indices, combiners=combiners)
loss = tf.add_n([tf.reduce_sum(e**2) for e in embeddings])
optimizer = sok.OptimizerWrapper(tf.train.GradientDescentOptimizer(rate / 10))
train_op = optimizer.apply_gradients(zip(tf.gradients(loss, sok_vars), sok_vars))
total_loss = hvd.allreduce(loss, op=hvd.Sum)

batches = [
    [[rng.integers(0, r, rng.integers(1, 4)).tolist() for _ in range(batch_size)] for r in rows] for _ in range(iters)
]
mine = slice(batch_size // hvd.size() * hvd.rank(), batch_size // hvd.size() * (hvd.rank() + 1))
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    losses = []
    for batch in batches:
        feed = {}
        for v, n, ids in zip(values, lengths, batch):
            feed |= {v: [i for row in ids[mine] for i in row], n: [len(row) for row in ids[mine]]}
        losses.append(session.run([total_loss, train_op], feed)[0])
    found = session.run(sok_vars)
    assert all((rows == v.eval(session)).all() for rows, v in zip(found, sok_vars))

# The same by NumPy, on the whole batch.
tables = [w.astype(np.float64) for w in weights]
for batch, reported in zip(batches, losses):
    expected = 0.0
    for table, ids, combiner in zip(tables, batch, combiners):
        scale = [1.0 / len(row) if combiner == "mean" else 1.0 for row in ids]
        pooled = [table[row].sum(0) * s for row, s in zip(ids, scale)]
        expected += sum((p**2).sum() for p in pooled)
        for row, p, s in zip(ids, pooled, scale):
            np.subtract.at(table, row, rate / 10 * 2 * p * s)
    np.testing.assert_allclose(reported, expected, rtol=1e-4)
for local_rows, table in zip(found, tables):
    np.testing.assert_allclose(local_rows, table[hvd.rank() :: hvd.size()], rtol=1e-4, atol=1e-5)
print(f"rank {hvd.rank()}: the rows are those of TensorFlow", flush=True)
