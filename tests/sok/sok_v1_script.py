"""A custom loop as a user of SOK 1.1 writes it: run by test_sparse_operation_kit.py, alone and under horovodrun."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import sparse_operation_kit as sok

GLOBAL_BATCH, SLOTS, NNZ, DIM, VOCABULARY, STEPS = 8, 3, 2, 4, 50, 4

hvd.init()
sok.Init(global_batch_size=GLOBAL_BATCH)
LOCAL_BATCH = GLOBAL_BATCH // hvd.size()


class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.sparse = sok.DistributedEmbedding(
            combiner="mean",
            max_vocabulary_size_per_gpu=VOCABULARY,
            embedding_vec_size=DIM,
            slot_num=SLOTS,
            max_nnz=NNZ,
            embedding_initializer="ones",
        )
        self.dense = sok.All2AllDenseEmbedding(
            max_vocabulary_size_per_gpu=VOCABULARY,
            embedding_vec_size=DIM,
            slot_num=SLOTS,
            nnz_per_slot=1,
            embedding_initializer=tf.keras.initializers.Ones(),
        )
        self.top = tf.keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, sparse_ids, dense_ids, training=True):
        pooled = tf.reshape(self.sparse(sparse_ids, training=training), [-1, SLOTS * DIM])
        rows = tf.reshape(self.dense(dense_ids, training=training), [-1, SLOTS * DIM])
        return self.top(tf.concat([pooled, rows], axis=1))


def batch_of(step):
    """Ids of the whole batch: pooled ones [B, F, 1 or 2] and single ones [B, F], and labels."""
    rng = np.random.default_rng(step)
    pooled = [
        [rng.integers(0, VOCABULARY, rng.integers(1, NNZ + 1)).tolist() for _ in range(SLOTS)]
        for _ in range(GLOBAL_BATCH)
    ]
    return pooled, rng.integers(0, VOCABULARY, [GLOBAL_BATCH, SLOTS]), rng.normal(size=[GLOBAL_BATCH, 1])


def sparse_of(samples):
    rows = [ids for sample in samples for ids in sample]
    places = [[r, c] for r, ids in enumerate(rows) for c in range(len(ids))]
    values = [i for ids in rows for i in ids]
    return tf.SparseTensor(tf.constant(places, tf.int64), tf.constant(values, tf.int64), [len(rows), NNZ])


model = Model()
emb_opt = sok.tf.keras.optimizers.Adam(learning_rate=0.1)
plugin_opt = sok.optimizers.Adam(learning_rate=0.1)
dense_opt = tf.keras.optimizers.SGD(learning_rate=0.1)


@tf.function
def train_step(sparse_ids, dense_ids, labels):
    with tf.GradientTape() as tape:
        logits = model(sparse_ids, dense_ids, training=True)
        loss = tf.reduce_sum((logits - labels) ** 2) / GLOBAL_BATCH
    emb_vars, other_vars = sok.split_embedding_variable_from_others(model.trainable_variables)
    emb_grads, other_grads = tape.gradient(loss, [emb_vars, other_vars])
    with sok.OptimizerScope(emb_vars[:1]):
        emb_opt.apply_gradients(zip(emb_grads[:1], emb_vars[:1]), experimental_aggregate_gradients=False)
    plugin_opt.apply_gradients(zip(emb_grads[1:], emb_vars[1:]), experimental_aggregate_gradients=False)
    other_grads = [hvd.allreduce(grad, op=hvd.Sum) for grad in other_grads]
    dense_opt.apply_gradients(zip(other_grads, other_vars))
    return loss


mine = slice(LOCAL_BATCH * hvd.rank(), LOCAL_BATCH * (hvd.rank() + 1))
for step in range(STEPS):
    pooled, single, labels = batch_of(step)
    train_step(
        sparse_of(pooled[mine]), tf.constant(single[mine][:, :, None], tf.int64), tf.constant(labels[mine], tf.float32)
    )

# The same on dense tables, by TensorFlow alone, on the whole batch.
tables = [tf.keras.Variable(np.ones([VOCABULARY, DIM], np.float32)) for _ in range(2)]
kernel, bias = tf.keras.Variable(np.ones([2 * SLOTS * DIM, 1], np.float32)), tf.keras.Variable([0.0])
table_opt, top_opt = tf.keras.optimizers.Adam(0.1), tf.keras.optimizers.SGD(0.1)
for step in range(STEPS):
    pooled, single, labels = batch_of(step)
    with tf.GradientTape() as tape:
        a = tf.nn.embedding_lookup_sparse(tables[0].value, sparse_of(pooled), None, combiner="mean")
        b = tf.gather(tables[1].value, single)
        top = tf.concat([tf.reshape(a, [GLOBAL_BATCH, -1]), tf.reshape(b, [GLOBAL_BATCH, -1])], 1)
        loss = tf.reduce_sum((tf.matmul(top, kernel.value) + bias.value - labels) ** 2) / GLOBAL_BATCH
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [v.value for v in (*tables, kernel, bias)])]
    table_opt.apply_gradients(zip(gradients[:2], tables))
    top_opt.apply_gradients(zip(gradients[2:], [kernel, bias]))

np.testing.assert_allclose(model.top.kernel.numpy(), kernel.numpy(), rtol=1e-4, atol=1e-5)
for layer, table in ((model.sparse, tables[0]), (model.dense, tables[1])):
    keys, rows = layer.embedding_variable.export()
    assert len(keys) and all(key % hvd.size() == hvd.rank() for key in keys.numpy())
    np.testing.assert_allclose(rows, table.numpy()[keys.numpy()], rtol=1e-4, atol=1e-5)
print(f"rank {hvd.rank()}: the rows are those of TensorFlow", flush=True)
