"""Stock optimizers that `sok.OptimizerWrapper` wraps, and the equivalent dense table that judges it.

The judge is the stock optimizer itself, after each of whose steps the rows outside the batch (of weights and slots) are
put back: SOK v2 leaves those alone.
"""

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import sok

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy

ROWS, DIM, STEPS = 8, 3, 5
MATRIX = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
BATCHES = [np.array(ids) for ids in ([1, 4, 1], [4, 7, 0, 0], [2], [1, 7, 2, 4, 1], [0, 1])]

MATCHED = {
    "keras.SGD": lambda: keras.optimizers.SGD(0.1),
    "keras.Adagrad": lambda: keras.optimizers.Adagrad(0.1, 0.2, epsilon=1e-3),
    "keras.Adam": lambda: keras.optimizers.Adam(0.1, 0.8, 0.99, 1e-4),
    "keras.Adam schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "tf_keras.SGD": lambda: tf_keras.optimizers.SGD(0.1),
    "tf_keras.Adagrad": lambda: tf_keras.optimizers.Adagrad(0.1, 0.2),
    "tf_keras.Adam": lambda: tf_keras.optimizers.Adam(0.1, 0.8, 0.99, 1e-4),
    "legacy.SGD": lambda: legacy.SGD(0.1, decay=0.3),
    "legacy.Adagrad": lambda: legacy.Adagrad(0.1),
    "legacy.Adam": lambda: legacy.Adam(0.1, 0.8, 0.99, 1e-4),
    "legacy.Adam schedule": lambda: legacy.Adam(tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "v1.GradientDescent": lambda: v1.GradientDescentOptimizer(0.1),
    "v1.Adagrad": lambda: v1.AdagradOptimizer(0.1, 0.2),
    "v1.Adam": lambda: v1.AdamOptimizer(0.1, 0.8, 0.99, 1e-4),
}
# Those that have no equal in sok.optimizers run on the rows of the batch by themselves.
BUFFERED = {
    "keras.SGD momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "keras.RMSprop": lambda: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.5),
    "keras.RMSprop schedule": lambda: keras.optimizers.RMSprop(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipvalue=0.5
    ),
    "keras.Adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "keras.Adamax": lambda: keras.optimizers.Adamax(0.1),
    "keras.Nadam": lambda: keras.optimizers.Nadam(0.1),
    "keras.Adam amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "keras.Lion": lambda: keras.optimizers.Lion(0.1),
    "tf_keras.SGD momentum": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
    "tf_keras.RMSprop": lambda: tf_keras.optimizers.RMSprop(0.1, centered=True, momentum=0.5),
    "tf_keras.RMSprop schedule": lambda: tf_keras.optimizers.RMSprop(
        tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "tf_keras.Adadelta": lambda: tf_keras.optimizers.Adadelta(0.5),
    "tf_keras.Adamax": lambda: tf_keras.optimizers.Adamax(0.1),
    "tf_keras.Nadam": lambda: tf_keras.optimizers.Nadam(0.1),
    "tf_keras.Lion": lambda: tf_keras.optimizers.Lion(0.1),
    "legacy.SGD momentum": lambda: legacy.SGD(0.1, momentum=0.9, nesterov=True),
    "legacy.RMSprop": lambda: legacy.RMSprop(0.1, centered=True, momentum=0.5),
    "legacy.Adadelta": lambda: legacy.Adadelta(0.5),
    "legacy.Adamax": lambda: legacy.Adamax(0.1),
    "legacy.Nadam": lambda: legacy.Nadam(0.1),
    "legacy.Adam amsgrad": lambda: legacy.Adam(0.1, amsgrad=True),
    "v1.Momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "v1.RMSProp": lambda: v1.RMSPropOptimizer(0.1, momentum=0.5),
    "v1.RMSProp centered": lambda: v1.RMSPropOptimizer(0.1, centered=True),
    "v1.Adadelta": lambda: v1.AdadeltaOptimizer(0.5),
    "keras.Ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.1),
    "tf_keras.Ftrl": lambda: tf_keras.optimizers.Ftrl(0.1, initial_accumulator_value=0.3),
    "legacy.Ftrl": lambda: legacy.Ftrl(0.1, l2_shrinkage_regularization_strength=0.1),
    "v1.Ftrl": lambda: v1.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}
STOCK = {**MATCHED, **BUFFERED}


def upstream(step):
    return np.random.default_rng(10 + step).normal(size=(len(BATCHES[step]), DIM)).astype(np.float32)


def tables_of(matrix):
    dynamic = sok.DynamicVariable(DIM)
    sok.assign(dynamic, np.arange(ROWS), matrix)
    return [sok.Variable(matrix), dynamic]


def variables_of(stock):
    return stock.variables() if callable(stock.variables) else stock.variables


def make_slots(stock, twin):
    if isinstance(stock, v1.Optimizer):
        stock._create_slots([twin])
    elif isinstance(stock, legacy.Optimizer):
        stock._create_all_weights([twin])
    else:
        stock.build([twin])


def stock_rows(stock):
    """The dense table after each step of the stock optimizer on the rows of the batch."""
    twin = keras.Variable(MATRIX) if isinstance(stock, keras.optimizers.Optimizer) else tf.Variable(MATRIX)
    make_slots(stock, twin)
    of_rows = [v for v in [twin, *variables_of(stock)] if tuple(v.shape) == (ROWS, DIM)]
    found = []
    for step in range(STEPS):
        gradient = np.zeros([ROWS, DIM], np.float32)
        np.add.at(gradient, BATCHES[step], upstream(step))
        before = [v.numpy().copy() for v in of_rows]
        stock.apply_gradients([(tf.constant(gradient), twin)])
        left = np.setdiff1d(np.arange(ROWS), BATCHES[step])
        for variable, old in zip(of_rows, before, strict=True):
            new = variable.numpy().copy()
            new[left] = old[left]
            variable.assign(new)
        found.append(twin.numpy().copy())
    return found


def gradients_of(tables, ids, upstream):
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(sok.all2all_dense_embedding(t, ids) * upstream) for t in tables])
    return tape.gradient(loss, tables)


def train_on(table, optimizer, steps, shift=0):
    for step in steps:
        ids, factor = tf.constant(BATCHES[step] + shift), tf.constant(upstream(step))
        optimizer.apply_gradients(zip(gradients_of([table], ids, factor), [table], strict=True))
