"""Trains a model with a table under a MirroredStrategy of two devices, and without; prints both results as JSON."""

import json

import numpy as np
import tensorflow as tf
import tf_keras

import sok

devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
BATCH = 8
# 44: the last batch is uneven, and keys come twice in a batch, in one replica and in both.
IDS = np.random.default_rng(0).zipf(1.3, (44, 2)) % 20
LABELS = (IDS.sum(1, keepdims=True) % 2).astype(np.float32)
DATA = tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(BATCH)


def model_of():
    tf_keras.utils.set_random_seed(1)
    keys = tf_keras.Input([2], dtype="int64")
    layer = sok.layers.for_keras(tf_keras).DistributedEmbedding("mean", 100, 4, slot_num=2, max_nnz=1, name="rows")
    hidden = tf_keras.layers.Dense(3, activation="tanh")(tf_keras.layers.Flatten()(layer(keys)))
    model = tf_keras.Model(keys, tf_keras.layers.Dense(1, activation="sigmoid")(hidden))
    return model, layer.embedding_variable


def report(model, table, optimizer, losses):
    dense = [w.numpy().ravel() for w in model.trainable_variables if w is not table]
    keys, rows = table.export()
    order = np.argsort(keys)
    return {
        "dense": np.concatenate(dense).tolist(),
        "keys": keys.numpy()[order].tolist(),
        "rows": rows.numpy()[order].tolist(),
        "slots": table.slots(optimizer.slot_set)[1].numpy()[order].tolist(),
        "losses": losses,
        "steps": int(table.step),
    }


def fit(strategy, stock, given):
    with strategy.scope():
        model, table = model_of()
        optimizer = sok.DistributedOptimizer(stock(), given)
        model.compile(optimizer, "binary_crossentropy")
    losses = model.fit(DATA, epochs=3, verbose=0).history["loss"]
    return report(model, table, optimizer.embedding_optimizer, losses)


def loop(strategy):
    with strategy.scope():
        model, table = model_of()
        stock, optimizer = tf_keras.optimizers.SGD(0.5), sok.optimizers.Adagrad(0.1)
        entropy = tf_keras.losses.BinaryCrossentropy(reduction="none")

    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(entropy(labels, model(ids, training=True)), global_batch_size=BATCH)
        others = [w for w in model.trainable_variables if w is not table]
        of_table, *grads = tape.gradient(loss, [table, *others])
        optimizer.apply_gradients([(of_table, table)])
        stock.apply_gradients(zip(grads, others, strict=True))
        return loss

    run = tf.function(lambda *batch: strategy.reduce("SUM", strategy.run(step, batch), axis=None))
    losses = [float(run(*batch)) for batch in strategy.experimental_distribute_dataset(DATA)]
    return report(model, table, optimizer, losses)


CASES = {
    "fit": lambda s: fit(s, lambda: tf_keras.optimizers.Adam(0.05), None),
    "fit of a legacy optimizer": lambda s: fit(s, lambda: tf_keras.optimizers.legacy.Adagrad(0.1), None),
    "fit with an optimizer for tables": lambda s: fit(
        s, lambda: tf_keras.optimizers.SGD(0.5), sok.optimizers.LazyAdam(0.05)
    ),
    "loop": loop,
}


def added_up_before(strategy):
    """A weight whose gradient all replicas have, added up by the loop itself."""
    with strategy.scope():
        weight = tf.Variable(0.0)
        optimizer = sok.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))

    def step(of_all):
        optimizer.apply_gradients([(of_all, weight)], experimental_aggregate_gradients=False)

    strategy.run(tf.function(step), [tf.constant(3.0)])
    return {"weight": float(weight.numpy()), "steps": int(optimizer.iterations.numpy())}


def in_a_v1_graph(strategy):
    with tf.Graph().as_default(), strategy.scope():
        try:
            sok.optimizers.SGD(0.1)
        except RuntimeError as error:
            assert strategy.num_replicas_in_sync > 1 and "(replicas: 2)" in str(error), error
        else:
            assert strategy.num_replicas_in_sync == 1
    return {"steps": 0}


CASES |= {"gradients that were added up before": added_up_before, "a v1 graph": in_a_v1_graph}
found = {}
for case, train in CASES.items():
    found[case] = []
    for strategy in (tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), tf.distribute.get_strategy()):
        sok.shutdown()
        found[case].append(train(strategy))
print(json.dumps(found))
