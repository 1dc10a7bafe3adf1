"""`sok.prefetch` under `tf.keras`: byte for byte what Keras gives without it. See keras_checks.py."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import sok

keras = tf.keras
ROWS, DIM, SAMPLES, BATCH = 200, 3, 30, 5
FEATURES = ("user", "item", "shop")


def head(rows):
    return keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Concatenate()(rows)))


def functional():
    inputs = [keras.Input((1,), dtype="int64", name=name) for name in FEATURES]
    return keras.Model(inputs, head([keras.layers.Embedding(ROWS, DIM, name=f"p_{i.name}")(i) for i in inputs]))


def sequential():
    layers = [keras.layers.Embedding(ROWS, DIM, name="p_rows"), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((1,), dtype="int64"), *layers])


class Subclassed(keras.Model):
    """Of layers of ours, with a call that does not say whether it trains, and a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.rows = [sok.Embedding(ROWS, DIM, sparse_as_dense_size=0, name=f"p_{name}") for name in FEATURES]
        self.dense, self.shapes = keras.layers.Dense(1), []

    def call(self, inputs):
        return self.dense(tf.concat([tf.squeeze(rows(ids), 1) for rows, ids in zip(self.rows, inputs, strict=True)], 1))

    def train_step(self, data):
        self.shapes.append(len(data[0]))  # it sees the batch of the dataset
        return super().train_step(data)


def ids(feature):
    return np.random.default_rng(feature).integers(0, ROWS, [SAMPLES, 1])


def data(kind, weights=True):
    inputs = ids(0) if kind is sequential else tuple(ids(i) for i in range(len(FEATURES)))
    labels = np.random.default_rng(9).normal(size=[SAMPLES, 1]).astype("float32")
    batches = (inputs, labels, np.linspace(0, 1, SAMPLES).astype("float32")) if weights else (inputs, labels)
    return tf.data.Dataset.from_tensor_slices(batches).batch(BATCH)


def run(kind, prefetched, eagerly, **of_fit):
    """All that Keras gives, of a model that begins anew."""
    sok.shutdown()
    keras.utils.set_random_seed(5)
    model, batches = kind(), data(kind)
    if kind is Subclassed:
        model(next(iter(batches))[0])
    else:
        model = sok.distributed_model(model)
    optimizer, at_once = sok.DistributedOptimizer("adam"), 2 if kind is functional else 1
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eagerly, steps_per_execution=at_once)
    model.fit(batches.take(1), verbose=0)  # its functions are there

    def given(dataset):
        return sok.prefetch(dataset, model, depth=2) if prefetched else dataset

    stops = keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)
    batches = given(batches)
    history = model.fit(
        given(data(kind).repeat()), epochs=2, steps_per_epoch=4, verbose=0, validation_data=batches, **of_fit
    )
    stopped = model.fit(batches, epochs=5, verbose=0, validation_data=given(data(kind, False)), callbacks=[stops])
    told = model.evaluate(given(data(kind)), steps=3, verbose=0)
    predicted = model.predict(given(data(kind).map(lambda x, *_: x) if kind is sequential else data(kind)), verbose=0)
    tables = [layer.embedding_variable for layer in model._flatten_layers() if hasattr(layer, "embedding_variable")]
    assert len(stopped.history["loss"]) == 2 and tables
    return {
        "history": [history.history, stopped.history, told],
        "predicted": predicted.tobytes(),
        "weights": [weight.tobytes() for weight in model.get_weights()],
        "seen": [int(table.ids_seen) for table in tables],
        "shapes": getattr(model, "shapes", [])[-1:],
    }


@pytest.mark.parametrize("kind, eagerly", [(functional, False), (sequential, True), (Subclassed, False)])
def check_what_is_prefetched_gives_the_same_bytes(kind, eagerly, caplog):
    expected = run(kind, False, eagerly)
    found = run(kind, True, eagerly)
    assert found == expected
    assert "in vain" not in caplog.text and "not ahead" not in caplog.text


def check_batches_begin_before_their_turn_and_no_more_than_depth_of_them():
    sok.shutdown()
    model, read = sok.distributed_model(functional()), []
    model.compile(sok.DistributedOptimizer("sgd"), "mse")

    def note():
        read.append(threading.current_thread().name)
        return np.int64(0)

    noted = tf.data.Dataset.zip(
        (data(functional), tf.data.Dataset.range(99).map(lambda _: tf.numpy_function(note, [], tf.int64)))
    )
    noted = noted.map(lambda batch, _: batch)
    options = tf.data.Options()  # by which tf.data itself reads no batch ahead
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    noted = noted.with_options(options)
    ahead = []

    def tell(batch, logs):
        while batch == 0 and len(read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)  # the program waits, and they begin nevertheless
        ahead.append(len(read) - batch - 1)

    deadline = time.monotonic() + 60
    tells = keras.callbacks.LambdaCallback(on_train_batch_end=tell)
    model.fit(sok.prefetch(noted, model, depth=3), verbose=0, callbacks=[tells])
    assert len(ahead) == SAMPLES // BATCH and ahead[0] == max(ahead) == 3


def check_an_error_of_the_data_is_raised_in_fit():
    sok.shutdown()
    model = sok.distributed_model(functional())
    model.compile(sok.DistributedOptimizer("sgd"), "mse")
    wrong = data(functional).map(lambda x, y, w: (x, tf.debugging.check_numerics(y / 0.0, "no number"), w))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
        model.fit(sok.prefetch(wrong, model), verbose=0)
    model.fit(sok.prefetch(data(functional), model), verbose=0)


def check_what_cannot_be_prefetched_is_refused_in_words():
    sok.shutdown()
    model, batches = sok.distributed_model(functional()), data(functional)
    with pytest.raises(TypeError, match="`dataset` must be a tf.data.Dataset of batches; of arrays: .*Received: list"):
        sok.prefetch([ids(0)], model)
    with pytest.raises(TypeError, match="`model` must be a model of Keras 3 or tf_keras"):
        sok.prefetch(batches, lambda x: x)
    with pytest.raises(ValueError, match="`depth` must be a whole number"):
        sok.prefetch(batches, model, depth=0)
    with pytest.raises(ValueError, match="is not built.*Call it with a batch first"):
        sok.prefetch(batches, Subclassed())
    inputs = keras.Input((1,))
    with pytest.raises(ValueError, match="looks up no table"):
        sok.prefetch(
            batches.map(lambda x, *_: tf.cast(x[0], tf.float32)), keras.Model(inputs, keras.layers.Dense(1)(inputs))
        )
    prefetched = sok.prefetch(batches, model)
    with pytest.raises(RuntimeError, match=r"Transform the dataset before: sok.prefetch\(dataset.map"):
        prefetched.map(lambda *batch: batch)
    with pytest.raises(RuntimeError, match="In loops of your own take sok.ahead"):
        iter(prefetched)
