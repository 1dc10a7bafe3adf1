"""A script as of DeepRec's documents, but for its imports and its optimizer: run by test_deeprec.py as a process."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior() if sys.argv[1] == "v2 behaviour off" else tf.disable_eager_execution()

import sok  # noqa: E402 (users switch first)

sok.deeprec.install()

tf.config.experimental.enable_distributed_strategy(strategy="collective")

with tf.variable_scope("tables", initializer=tf.ones_initializer()):
    user = tf.get_embedding_variable("user", embedding_dim=4)
    item = tf.get_embedding_variable("item", embedding_dim=2, key_dtype=tf.int64, initializer=tf.zeros_initializer())
    plain = tf.get_variable("plain", [10, 3])
with tf.variable_scope("tables", reuse=True):
    assert tf.get_embedding_variable("user", 4) is user

values = tf.constant([3, 1, 4, 1, 5, 9, 2, 6], tf.int64)
ragged = tf.RaggedTensor.from_row_splits(values, tf.constant([0, 4, 4, 7, 8, 8], tf.int64))
outputs = tf.nn.group_embedding_lookup_sparse(
    [user, item, plain, user],
    [ragged, ragged.to_sparse(), ragged, ragged],
    ["sum", "mean", "mean", "mean"],
    "mod",
    None,
    "group",
)
assert [o.shape.as_list()[1:] for o in outputs] == [[4], [2], [3], [4]]
(rows,) = tf.nn.group_embedding_lookup([user], [tf.constant([[7]], tf.int64)])

with tf.feature_column.group_embedding_column_scope(name="columns"):
    columns = [
        tf.feature_column.embedding_column(tf.feature_column.categorical_column_with_identity(name, 10), 3)
        for name in ("second", "first")
    ]
net = tf.feature_column.input_layer({"first": [[1], [2]], "second": [[3], [4]]}, columns)
lookups = [op.type for op in net.graph.get_operations() if op.type in ("Sok>GroupLookup", "Sok>TableLookup")]
assert lookups == ["Sok>GroupLookup", "Sok>TableLookup"], lookups
pools = [op.type for op in net.graph.get_operations() if op.type in ("Sok>VariablePool", "Sok>TensorPool")]
assert len(pools) == 2, pools

loss = tf.add_n([tf.reduce_sum(o) for o in outputs]) + tf.reduce_sum(net**2)
sizes = [user.size(), item.size()]
step = tf.train.get_or_create_global_step()
train = sok.DistributedOptimizer(tf.train.AdagradOptimizer(0.1)).minimize(loss, global_step=step)
with tf.train.MonitoredTrainingSession(hooks=[sok.hooks.BroadcastVariablesHook(0)]) as session:

    def run_alone(what):
        return session.run_step_fn(lambda step_context: step_context.session.run(what))

    first, of_item, of_plain, mean_of_first, row, before = run_alone([*outputs, rows, loss])
    assert first[:, 0].tolist() == [4, 0, 3, 1, 0] and mean_of_first[:, 0].tolist() == [1, 0, 1, 1, 0]
    assert of_plain[:, 0].tolist() == [1, 0, 1, 1, 0] and not of_item.any()
    assert row.tolist() == [[[1, 1, 1, 1]]]
    for _ in range(3):
        session.run(train)
    assert run_alone(loss) < before
    assert run_alone(step) == 3
    np.testing.assert_array_equal(run_alone(sizes), [8, 7])
sok.deeprec.uninstall()
print("the script ran to its end")
