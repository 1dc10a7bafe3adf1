"""Models of Keras' own layers, converted: on all ranks they train as the model that they were does on one."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.multiprocess.training import by_rank_0

ROWS, DIM, STEPS, BATCH = 100, 4, 4, 24


def deep_fm(library, fields):
    """A table of vectors and one of numbers for each field."""
    inputs = [library.Input((1,), dtype="int64", name=f"c{i}") for i in range(fields)]
    vectors = [library.layers.Embedding(ROWS, DIM, name=f"v_{i.name}")(i) for i in inputs]
    linear = library.layers.Add()([library.layers.Embedding(ROWS, 1, name=f"l_{i.name}")(i) for i in inputs])
    x = library.layers.Concatenate(axis=1)(vectors)
    deep = library.layers.Dense(8, activation="tanh")(library.layers.Flatten()(x))
    total = library.layers.GlobalAveragePooling1D()(x)
    x = library.layers.Concatenate()(
        [library.layers.Flatten()(linear), library.layers.Multiply()([total, total]), deep]
    )
    return library.Model(inputs, library.layers.Dense(1)(x))


def subclassed(library, fields):
    class Model(library.Model):
        def __init__(self):
            super().__init__()
            self.vectors = [library.layers.Embedding(ROWS, DIM, name=f"sub_c{i}") for i in range(fields)]
            self.dense = library.layers.Dense(1)

        def call(self, inputs, training=False):
            rows = [layer(ids) for layer, ids in zip(self.vectors, inputs, strict=True)]
            return self.dense(tf.concat([tf.squeeze(r, 1) for r in rows], 1))

    model = Model()
    model([tf.zeros([1, 1], tf.int64)] * fields)
    return model


def samples(fields):
    """The whole batches: no id comes twice in one, since Keras 3 squares gradients of equal ids one by one."""
    rng = np.random.default_rng(3)
    ids = [np.concatenate([rng.permutation(ROWS)[:BATCH] for _ in range(STEPS)])[:, None] for _ in range(fields)]
    return ids, rng.normal(size=(STEPS * BATCH, 1)).astype("float32")


def fit(world, model, fields, ids=None):
    """Trains twice with this rank's part of each batch; each step is to be one exchange, the first one too."""
    all_ids, labels = samples(fields)
    ids = all_ids if ids is None else ids
    mine = np.arange(STEPS * BATCH).reshape(STEPS, world.size, -1)[:, world.rank].ravel()
    options = dict(batch_size=BATCH // world.size, shuffle=False, verbose=0)
    for more in {"broadcast_variables": 1}, {}:  # worker 0's dense weights, with the first fit alone
        with sok.trace() as counted:
            model.fit([c[mine] for c in ids], labels[mine], **options)
        if world.size == 1:
            continue
        found = collections.Counter()
        for name, one in counted.by_name.items():
            is_of_rows = any(f"/{what}" in name for what in ("keys", "rows", "grads"))
            what = "rows" if is_of_rows else name.split("/")[1]
            found["fit" if what == "meeting" else what] += one["collectives"]
        # Two: whether workers have as many batches, and whether one stops after the epoch.
        assert found == {"rows": 3 * STEPS, "dense_gradients": STEPS, "fit": 2, **more}, counted.by_name


def trained_alike(world, library, build, optimizer, fields=4, ids=None, **options):
    library.utils.set_random_seed(6 + world.rank)  # worker 0's weights count
    model = build(library, fields)
    weights = model.get_weights()
    assert sok.distributed_model(model, **options) is model
    model.compile(sok.DistributedOptimizer(optimizer()), "mse")
    all_ids, labels = samples(fields)
    ids = all_ids if ids is None else [ids()] * fields
    fit(world, model, fields, ids)
    expected = by_rank_0(lambda: trained_stock(build(library, fields), weights, optimizer(), ids, labels, 2))
    np.testing.assert_allclose(model.predict(ids, batch_size=BATCH, verbose=0), expected, rtol=1e-4, atol=1e-5)
    return model


def trained_stock(stock, weights, optimizer, ids, labels, epochs):
    """Predictions of a model that one worker has trained with the whole batches."""
    stock.set_weights(weights)
    stock.compile(optimizer, "mse")
    stock.fit(ids, labels, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return stock.predict(ids, batch_size=BATCH, verbose=0).tolist()


def check_a_deep_fm_of_26_and_26_tables_makes_one_exchange(world):
    model = sok.distributed_model(deep_fm(keras, 26))
    model.compile(sok.DistributedOptimizer("adagrad"), "mse")
    fit(world, model, 26)


def check_a_converted_model_of_keras_3_is_trained_as_stock(world):
    trained_alike(world, keras, deep_fm, lambda: keras.optimizers.Adagrad(0.05))


def limited(library, fields):
    """Small tables, of which each batch has all rows, with a penalty and a constraint."""
    terms = dict(
        embeddings_regularizer=library.regularizers.L2(0.1), embeddings_constraint=library.constraints.NonNeg()
    )
    inputs = [library.Input((1,), dtype="int64", name=f"c{i}") for i in range(fields)]
    rows = [
        library.layers.Embedding(BATCH // 2, DIM, name=f"limited_{i.name}", **terms)(i % (BATCH // 2)) for i in inputs
    ]
    return library.Model(inputs, library.layers.Dense(1)(library.layers.Flatten()(library.layers.Add()(rows))))


def shrinking(library, fields):
    inputs = [library.Input((1,), dtype="int64", name=f"c{i}") for i in range(fields)]
    layers = [
        library.layers.Embedding(
            ROWS, DIM, name=f"shrinking_{i.name}", embeddings_regularizer=library.regularizers.L2(l2)
        )
        for i, l2 in zip(inputs, (0.1, 0.2, 0.1, 0.2), strict=True)
    ]
    rows = [layer(i) for layer, i in zip(layers, inputs, strict=True)]
    return library.Model(inputs, library.layers.Dense(1)(library.layers.Flatten()(library.layers.Add()(rows))))


def check_a_penalty_and_a_constraint_are_those_of_stock(world):
    def ids():
        rng = np.random.default_rng(3)
        return np.concatenate([rng.permutation(BATCH) for _ in range(STEPS)])[:, None]

    trained_alike(world, keras, limited, lambda: keras.optimizers.SGD(0.05), ids=ids, sparse_as_dense_size=0)


def check_an_exact_penalty_is_that_of_stock(world):
    trained_alike(world, keras, shrinking, lambda: keras.optimizers.SGD(0.05), regularize="exact")


def check_a_converted_model_of_tf_keras_is_trained_as_stock(world):
    trained_alike(world, tf_keras, deep_fm, lambda: tf_keras.optimizers.Adam(0.02))


def check_a_converted_subclassed_model_is_trained_as_stock(world):
    model = trained_alike(world, keras, subclassed, lambda: keras.optimizers.SGD(0.05))
    ids = [np.full([2, 1], ROWS if i == 2 and world.rank == world.size - 1 else 1) for i in range(4)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="sub_c2.*100"):
        model.predict(ids, batch_size=2, verbose=0)
    model.predict([np.ones([2, 1], "int64")] * 4, verbose=0)


def check_a_model_that_cannot_be_converted_is_refused_on_all_ranks(world):
    ids = keras.Input((1,), dtype="int64")
    # On one rank alone, as a program may have it by mistake.
    constraint = "unit_norm" if world.rank == world.size - 1 else None
    layer = keras.layers.Embedding(ROWS, DIM, name="refused", embeddings_constraint=constraint)
    model = keras.Model(ids, layer(ids))
    with pytest.raises(ValueError, match="refused .Embedding.: `embeddings_constraint` UnitNorm.axis=0. does not act"):
        sok.distributed_model(model)
    assert type(layer) is keras.layers.Embedding
