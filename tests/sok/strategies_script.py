"""What a process with two devices makes and does under each strategy; prints case to error, or None, as JSON."""

import json

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import sok

devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
IDS = np.array([[1, 2], [3, 4], [1, 4], [5, 6]])
STRATEGIES = {
    "MirroredStrategy": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "CentralStorageStrategy": lambda: tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]),
}


def embedding(library):
    return sok.layers.for_keras(library).DistributedEmbedding("sum", 100, 4, slot_num=2, max_nnz=1)


# Made in a scope.
MAKERS = {
    "Keras 3 layer": lambda: embedding(keras),
    "tf_keras layer": lambda: embedding(tf_keras),
    "EmbeddingVariable": lambda: sok.EmbeddingVariable(4, 100, name="made"),
    "Variable": lambda: sok.Variable(np.ones([10, 4], np.float32)),
    "DynamicVariable": lambda: sok.DynamicVariable(dimension=4),
    "deeprec": lambda: sok.deeprec.get_embedding_variable("deeprec", 4),
    "optimizer": lambda: sok.optimizers.SGD(0.1),
    "OptimizerWrapper": lambda: sok.OptimizerWrapper(keras.optimizers.SGD(0.1)),
    "DistributedOptimizer": lambda: sok.DistributedOptimizer(keras.optimizers.SGD(0.1)),
    "tape": lambda: sok.DistributedGradientTape(tf.GradientTape()),
}


def column_table():
    ids = tf.feature_column.categorical_column_with_identity("ids", 10)
    return tf_keras.layers.DenseFeatures([sok.feature_column.embedding_column(ids, 4)])({"ids": IDS})


# Made before, used in a step that the strategy runs.
table = sok.EmbeddingVariable(4, 100, name="used")
weight = tf.Variable(1.0)
users = {
    "lookup": lambda: sok.group_embedding_lookup([table], [tf.constant([1, 2])]),
    "embedding_lookup": lambda: tf.nn.embedding_lookup(table, tf.constant([1, 2])),
    "feature column": column_table,
}
steps = {
    "optimizer step": sok.optimizers.SGD(0.1),
    "wrapper step": sok.OptimizerWrapper(keras.optimizers.SGD(0.1)),
    "distributed step": sok.DistributedOptimizer(tf_keras.optimizers.SGD(0.1)),
}
for case, optimizer in steps.items():
    variable = table if case == "optimizer step" else weight
    users[case] = lambda o=optimizer, v=variable: o.apply_gradients([(None if v is table else tf.constant(1.0), v)])


def fit(library, strategy):
    made = embedding(library)
    made.build()
    with strategy.scope():
        ids = library.Input([2], dtype="int64")
        model = library.Model(ids, library.layers.Dense(1)(library.layers.Flatten()(made(ids))))
        model.compile("sgd", "mse")
    model.fit(IDS, np.ones([4, 1], np.float32), verbose=0)


def error_of(f):
    try:
        f()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


told = {}
for name, make in STRATEGIES.items():
    strategy = make()
    for case, f in MAKERS.items():
        with strategy.scope():
            told[f"{name}, {case}"] = error_of(f)
    for case, f in users.items():
        told[f"{name}, {case}"] = error_of(lambda f=f, run=strategy.run: run(f))
    if name == "MirroredStrategy":
        told[f"{name}, fit of Keras 3"] = error_of(lambda s=strategy: fit(keras, s))
        with strategy.scope():
            told[f"{name}, distributed_model"] = error_of(lambda: sok.distributed_model(tf_keras.Sequential()))
        told[f"{name}, fit of tf_keras"] = error_of(lambda s=strategy: fit(tf_keras, s))
print(json.dumps(told))
