"""Training under MultiWorkerMirroredStrategy, where the strategy sums dense gradients, and tables their own.

What `check_*` of these names return must not depend on the number of workers.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.layers import for_keras
from tests.multiprocess import checks_cluster
from tests.multiprocess.harness import World
from tests.multiprocess.training import BATCH, DIM, IDS_PER_SLOT, SLOTS, even_shares, samples, shards

STEPS = 10


def strategy_of(world):
    """That of the program; on one worker none."""
    return checks_cluster.strategy() if world.size > 1 else tf.distribute.get_strategy()


def model_of(name):
    tf_keras.utils.set_random_seed(11)
    layers = for_keras(tf_keras)
    ids = tf_keras.Input((SLOTS, IDS_PER_SLOT), dtype="int64")
    pooled = layers.DistributedEmbedding("mean", 200, DIM, SLOTS, IDS_PER_SLOT, name=f"{name}_pooled")
    rows = layers.Embedding(97, DIM, name=f"{name}_rows", sparse_as_dense_size=0)
    x = [tf_keras.layers.Flatten()(pooled(ids)), tf_keras.layers.Flatten()(rows(tf.abs(ids)))]
    x = tf_keras.layers.Dense(5, activation="tanh")(tf_keras.layers.Concatenate()(x))
    model = tf_keras.Model(ids, tf_keras.layers.Dense(1, activation="sigmoid")(x))
    return model, {"pooled": pooled.embedding_variable, "rows": rows.embedding_variable}


def batches(world):
    """This worker's samples of all steps, in order."""
    ids, labels = samples()
    shares = even_shares(world)[:STEPS]
    return [np.concatenate([part[share] for share in shares]) for part in (ids, labels[:, np.newaxis])]


def report(model, tables, optimizer, losses):
    weights = [w.numpy().ravel() for w in model.trainable_variables if w not in tables.values()]
    return {
        "losses": np.asarray(losses, np.float64),
        "dense": np.concatenate(weights),
        "tables": shards(tables, dict.fromkeys(tables, optimizer.slot_set)),
    }


def fit(world, name, stock, given=None, **options):
    strategy = strategy_of(world)
    with strategy.scope():
        model, tables = model_of(name)
        optimizer = sok.DistributedOptimizer(stock(), given)
        model.compile(optimizer, "binary_crossentropy", **options)
    # All workers name all samples, in batches of all workers: TensorFlow gives each its part of each batch.
    dataset = tf.data.Dataset.from_tensor_slices(tuple(batches(World(0, 1)))).batch(BATCH)
    losses = []

    def record(batch, logs):
        losses.append(logs["loss"] / world.size)  # tf_keras adds up what workers say of a batch, who say the same

    told = tf_keras.callbacks.LambdaCallback(on_train_batch_end=record)
    losses.append(model.fit(dataset, verbose=0, callbacks=[told]).history["loss"][0])
    assert optimizer.iterations.numpy() == STEPS
    return report(model, tables, optimizer.embedding_optimizer, losses)


def check_strategy_fit(world):
    with sok.trace() as trace:
        found = fit(world, "strategy_adam", lambda: tf_keras.optimizers.Adam(0.02))
    # Dense gradients are the strategy's alone.
    assert not [name for name in trace.by_name if "dense_gradients" in name]
    return found


def check_strategy_fit_of_a_legacy_optimizer_in_several_steps_at_once(world):
    return fit(world, "strategy_legacy", lambda: tf_keras.optimizers.legacy.Adagrad(0.1), steps_per_execution=5)


def check_strategy_custom_loop(world):
    strategy = strategy_of(world)
    with strategy.scope():
        model, tables = model_of("strategy_loop")
        stock, optimizer = tf_keras.optimizers.SGD(0.5), sok.optimizers.Adagrad(0.1)
        entropy = tf_keras.losses.BinaryCrossentropy(reduction="none")

    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(entropy(labels, model(ids, training=True)), global_batch_size=BATCH)
        variables = model.trainable_variables
        of_tables, of_others = sok.split_embedding_variable_from_others(variables)
        grads = tape.gradient(loss, [*of_tables, *of_others])
        optimizer.apply_gradients(zip(grads, of_tables, strict=False))
        stock.apply_gradients(zip(grads[len(of_tables) :], of_others, strict=True))
        return loss

    @tf.function
    def run(ids, labels):
        of_replicas = strategy.run(step, (ids, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, of_replicas, axis=None)

    ids, labels = batches(world)
    size = BATCH // world.size
    losses = []
    for i in range(STEPS):
        mine = slice(i * size, (i + 1) * size)
        losses.append(float(run(tf.constant(ids[mine]), tf.constant(labels[mine]))))
    return report(model, tables, optimizer, losses)


def check_what_cannot_be_under_a_strategy_says_so(world):
    if world.size == 1:
        return
    strategy = strategy_of(world)
    layer = for_keras(tf_keras).DistributedEmbedding("sum", 20, DIM, 1, 1, name="strategy_outside")
    with strategy.scope():
        for made in (
            lambda: for_keras(keras).DistributedEmbedding("sum", 20, DIM, 1, 1),
            lambda: for_keras(keras).Embedding(20, DIM, sparse_as_dense_size=0),
            lambda: sok.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        ):
            with pytest.raises(RuntimeError, match="Keras 3 does not train under it.*tf_keras.*horovodrun"):
                made()
        with pytest.raises(RuntimeError, match=r"DistributedGradientTape reduces gradients.*Use a tf.GradientTape"):
            sok.DistributedGradientTape(tf.GradientTape())
        with pytest.raises(RuntimeError, match=r"tf.compat.v1.train optimizer reduces.*Give it one of tf_keras"):
            sok.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        scaled = tf_keras.mixed_precision.LossScaleOptimizer(sok.DistributedOptimizer(tf_keras.optimizers.SGD(0.1)))
        weight = tf.Variable(1.0)
        with pytest.raises(RuntimeError, match="LossScaleOptimizer around .*mixed_bfloat16"):
            strategy.run(lambda: scaled.apply_gradients([(tf.constant(1.0), weight)]))
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert layer(tf.constant([[1]], tf.int64)).shape == [1, 1, DIM]
    sok.shutdown()
    with strategy.scope(), pytest.raises(RuntimeError, match="sok.Init has not been called"):
        sok.EmbeddingVariable(2, 10)
    sok.Init(global_batch_size=24, seed=3, deadline=120)
