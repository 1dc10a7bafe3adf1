"""A custom loop as a user of SOK 2.1 writes it: run by test_sparse_operation_kit.py, alone and under horovodrun."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras

import sparse_operation_kit as sok

hvd.init()
sok.init()

rows, cols, hotness = [65, 17, 33], [8, 4, 4], [5, 3, 2]
combiners = ["mean", "sum", "sum"]
batch_size, iters = 16, 5

rng = np.random.default_rng(0)
weights = [rng.random([r, c]).astype(np.float32) for r, c in zip(rows, cols)]
sok_vars = [
    sok.Variable(weights[0], dtype=tf.float32),
    sok.Variable(weights[1], dtype=tf.float32, mode="localized:0"),
    sok.DynamicVariable(dimension=cols[2], var_type="hbm", initializer="13"),
]
weights[2] = np.full([rows[2], cols[2]], 13.0, np.float32)
w = tf.Variable(np.ones([sum(cols), 1], np.float32))
tables, others = sok.filter_variables([*sok_vars, w])
assert len(tables) == 3 and len(others) == 1

assert sok.tf_version[0] == 2 and isinstance(sok_vars[0], sok.DistributedVariable)
assert isinstance(sok_vars[1], sok.LocalizedVariable) and sok.lookup.lookup_sparse is sok.lookup_sparse

local_indices = [np.arange(hvd.rank(), r, hvd.size()) for r in rows]

total_indices = []
for i in range(len(rows)):
    lengths = rng.integers(1, hotness[i] + 1, iters * batch_size)
    values = rng.integers(0, rows[i], lengths.sum())
    total_indices.append(tf.RaggedTensor.from_row_lengths(tf.constant(values, tf.int64), lengths))
left = batch_size // hvd.size() * hvd.rank()
right = batch_size // hvd.size() * (hvd.rank() + 1)

optimizer = tf_keras.optimizers.legacy.Adam(learning_rate=0.1)
sok_optimizer = sok.OptimizerWrapper(optimizer)


@tf.function
def step(params, indices):
    with tf.GradientTape() as tape:
        embeddings = sok.lookup_sparse(params, indices, combiners=combiners)
        loss = tf.reduce_sum(tf.matmul(tf.concat(embeddings, 1), w) ** 2) / batch_size
    emb_grads, (w_grad,) = tape.gradient(loss, [params, [w]])
    sok_optimizer.apply_gradients(zip(emb_grads, params))
    optimizer.apply_gradients([(hvd.allreduce(w_grad, op=hvd.Sum), w)])
    return hvd.allreduce(loss, op=hvd.Sum)


losses = []
for i in range(iters):
    indices = [t[i * batch_size + left : i * batch_size + right] for t in total_indices]
    losses.append(step(sok_vars, indices).numpy())

# The same by TensorFlow alone, on the whole batch. The wrapper leaves rows outside the batch as they are.
tf_vars, tf_w = [tf.Variable(x) for x in weights], tf.Variable(np.ones([sum(cols), 1], np.float32))
tf_optimizer = tf_keras.optimizers.legacy.Adam(learning_rate=0.1)
for i in range(iters):
    indices = [t[i * batch_size : (i + 1) * batch_size].to_sparse() for t in total_indices]
    with tf.GradientTape() as tape:
        pooled = [tf.nn.embedding_lookup_sparse(v, x, None, combiner=c) for v, x, c in zip(tf_vars, indices, combiners)]
        loss = tf.reduce_sum(tf.matmul(tf.concat(pooled, 1), tf_w) ** 2) / batch_size
    gradients = tape.gradient(loss, [*tf_vars, tf_w])
    states = [[v, *(tf_optimizer.get_slot(v, s) for s in ("m", "v") if i)] for v in tf_vars]
    before = [[s.numpy() for s in state] for state in states]
    tf_optimizer.apply_gradients(zip(gradients, [*tf_vars, tf_w]))
    for variable, x, old in zip(tf_vars, indices, before):
        untouched = np.setdiff1d(np.arange(variable.shape[0]), x.values.numpy())
        state = [variable, *(tf_optimizer.get_slot(variable, s) for s in ("m", "v"))]
        for place, tensor in enumerate(state):
            value = tensor.numpy()
            value[untouched] = old[place][untouched] if place < len(old) else 0.0
            tensor.assign(value)
    np.testing.assert_allclose(losses[i], loss, rtol=1e-4)

np.testing.assert_allclose(w, tf_w, rtol=1e-3, atol=1e-4)
for variable in sok_vars[:2]:
    matrix = sok.export(variable)[1]
    assert variable.shape == matrix.shape
    np.testing.assert_allclose(variable**2, matrix**2)
for i, variable in enumerate(sok_vars):
    keys, found = sok.export(variable)
    assert [variable.target_gpu, len(keys) > 0] in ([-1, True], [0, hvd.rank() == 0])
    np.testing.assert_allclose(found, tf_vars[i].numpy()[keys.numpy()], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        sok.all2all_dense_embedding(variable, local_indices[i]),
        tf_vars[i].numpy()[local_indices[i]],
        rtol=1e-3,
        atol=1e-4,
    )
print(f"rank {hvd.rank()}: the rows are those of TensorFlow", flush=True)
