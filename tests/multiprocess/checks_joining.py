"""Workers of one `fit` with unequal numbers of batches: all train as one worker does on the samples of all."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.multiprocess.checks_convert import BATCH, DIM, ROWS, samples
from tests.multiprocess.training import by_rank_0

FIELDS = 2


def model_of(library):
    inputs = [library.Input((1,), dtype="int64", name=f"c{i}") for i in range(FIELDS)]
    rows = [library.layers.Embedding(ROWS, DIM, name=f"joining_{i.name}")(i) for i in inputs]
    # A variable, of which equal ids come in each batch, and in those of other workers.
    rows.append(library.layers.Embedding(7, DIM, name="joining_variable")(inputs[0] % 7))
    return library.Model(inputs, library.layers.Dense(1)(library.layers.Flatten()(library.layers.Add()(rows))))


def uneven(world, counts):
    """The batches of each rank, step by step: the last one of each is smaller. A step's ids differ."""
    rng, steps = np.random.default_rng(8), []
    for step in range(max(counts)):
        order, batches = [rng.permutation(ROWS) for _ in range(FIELDS)], []
        for rank, count in enumerate(counts):
            size = 16 if step < count - 1 else 5 + rank
            part = slice(16 * rank, 16 * rank + size) if step < count else slice(0)
            batches.append(([one[part, None] for one in order], rng.normal(size=(len(order[0][part]), 1))))
        steps.append(batches)
    return steps


def dataset(batches, known):
    spec = (tuple(tf.TensorSpec([None, 1], tf.int64) for _ in range(FIELDS)), tf.TensorSpec([None, 1], tf.float64))
    batches = [(tuple(ids), labels) for ids, labels in batches]
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches))) if known else data


def joined(world, library, optimizer, known=True, fewer=2, scale=None, stop=None, depth=0, **options):
    """With fewer batches on one rank than on another, in `fit`: as one worker whose steps have the samples of all.

    Args:
        known: whether Keras knows how many batches there are.
        fewer: batches of each rank than of the one before.
        scale: what makes a `LossScaleOptimizer` of an optimizer.
        stop: the number of batches after which the last rank stops in its first epoch.
        depth: how many batches lookups begin ahead.
        options: of `compile`.
    """
    counts = [max(0, 5 - fewer * rank) for rank in range(world.size)]
    library.utils.set_random_seed(6)
    model = model_of(library)
    weights = model.get_weights()
    steps, (test_ids, test_labels) = uneven(world, counts), samples(FIELDS)
    sok.distributed_model(model)
    distributed = sok.DistributedOptimizer(optimizer())
    model.compile(distributed if scale is None else scale(distributed), "mse", **options)
    mine = [step[world.rank] for step in steps if len(step[world.rank][1])]
    stops = library.callbacks.EarlyStopping(monitor="val_loss", patience=0, min_delta=1e3)
    last = world.rank == world.size - 1

    def stop_early(batch, logs):
        model.stop_training = model.stop_training or (stop is not None and last and batch + 1 == stop)

    data = dataset(mine, known)
    history = model.fit(
        sok.prefetch(data, model, depth) if depth else data,
        epochs=3,
        verbose=0,
        validation_data=([c[world.rank :: world.size] for c in test_ids], test_labels[world.rank :: world.size]),
        callbacks=[
            sok.callbacks.MetricSumCallback(),
            library.callbacks.LambdaCallback(on_train_batch_end=stop_early),
            stops,
        ],
    )
    epochs = 2 if stop is None else 1  # no epoch is better by 1000 than the first
    if stop is not None:
        for step in steps[stop:]:
            step.pop()
        steps = [step for step in steps if step]

    def stock_says():
        stock = model_of(library)
        stock.set_weights(weights)
        stock.compile(optimizer(), "mse", run_eagerly=True)  # few steps, each shape of which would be traced
        for _ in range(epochs):
            for step in steps:
                ids = [np.concatenate(c) for c in zip(*(ids for ids, _ in step), strict=True)]
                stock.train_on_batch(ids, np.concatenate([labels for _, labels in step]))
        return np.asarray(stock([tf.constant(c) for c in test_ids])).tolist()

    assert len(history.history["val_loss"]) == epochs
    if library is keras or known:  # tf_keras alone counts the batch that there was not
        assert int(np.asarray(model.optimizer.iterations)) == epochs * len(steps)
    expected = np.asarray(by_rank_0(stock_says), np.float32)
    found = model.predict(test_ids, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(history.history["val_loss"][-1], np.mean((expected - test_labels) ** 2), rtol=1e-4)
    sok.broadcast_variables(model.variables)
    np.testing.assert_array_equal(model.predict(test_ids, batch_size=BATCH, verbose=0), found)


def check_workers_with_fewer_batches_join_the_others_in_keras_3(world):
    joined(world, keras, lambda: keras.optimizers.Adam(0.02))


def check_workers_with_fewer_batches_join_the_others_in_tf_keras(world):
    # On one worker tf_keras itself, with slices, lets the momentum decay in the step that finds no more batch.
    momentum = 0.5 if world.size > 1 else 0.0
    joined(world, tf_keras, lambda: tf_keras.optimizers.SGD(0.05, momentum=momentum), known=False)


def check_workers_join_eagerly_in_keras_3(world):
    joined(world, keras, lambda: keras.optimizers.Adagrad(0.05), run_eagerly=True)


def check_workers_join_eagerly_in_tf_keras(world):
    joined(world, tf_keras, lambda: tf_keras.optimizers.Adagrad(0.05), known=False, run_eagerly=True)


def check_workers_join_several_steps_at_once_in_keras_3(world):
    joined(world, keras, lambda: keras.optimizers.Adagrad(0.05), steps_per_execution=2)


def check_workers_join_several_steps_at_once_in_tf_keras(world):
    if world.size > 2:
        return  # what depends on their number, Keras 3 shows
    joined(world, tf_keras, lambda: tf_keras.optimizers.Adagrad(0.05), steps_per_execution=2)


def check_workers_join_scaled_steps_in_keras_3(world):
    joined(world, keras, lambda: keras.optimizers.Adagrad(0.05), scale=keras.optimizers.LossScaleOptimizer)


def check_workers_join_scaled_steps_in_tf_keras(world):
    if world.size > 2:
        return  # what depends on their number, Keras 3 shows
    scale = tf_keras.mixed_precision.LossScaleOptimizer
    for optimizers in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        joined(world, tf_keras, lambda optimizers=optimizers: optimizers.Adagrad(0.05), scale=scale)


def check_a_worker_without_a_batch_joins(world):
    joined(world, keras, lambda: keras.optimizers.Adagrad(0.05), fewer=5)


def check_workers_join_steps_whose_lookups_began_before(world):
    """Of two workers one has no batch, of three one has a single one."""
    if world.size > 1:
        fewer = 5 if world.size == 2 else 2
        joined(world, keras, lambda: keras.optimizers.Adagrad(0.05), fewer=fewer, known=world.size == 2, depth=2)


def check_a_worker_that_stops_in_an_epoch_joins_and_all_stop(world):
    for fewer, known in (0, True), (2, False):
        if 5 - fewer * (world.size - 1) > 2:
            joined(world, keras, lambda: keras.optimizers.Adagrad(0.05), fewer=fewer, known=known, stop=2)


def model_with_a_function(name):
    rows = sok.Embedding(ROWS, DIM, sparse_as_dense_size=0, name=name)
    look_up = tf.function(rows, autograph=False)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows, self.dense = rows, keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(tf.squeeze(look_up(inputs[0]), 1))

    model = Model()
    model.compile(sok.DistributedOptimizer("sgd"), "mse")
    return model


def check_workers_that_cannot_join_are_refused_on_all_ranks(world):
    if world.size == 1:
        return
    steps = uneven(world, [5 - rank for rank in range(world.size)])
    mine = [step[world.rank] for step in steps if len(step[world.rank][1])]
    words = "(?s)unequal numbers of batches.*5 on rank 0, 4 on rank 1.*a tf.function"
    with pytest.raises(ValueError, match=words):
        model_with_a_function("refused_known").fit(dataset(mine, known=True), verbose=0)
    model = model_with_a_function("refused_unknown")
    model((tf.zeros([16, 1], tf.int64),) * 2, training=True)
    words = r"(?s)unequal numbers of batches.*more on rank 0.* on rank \d.*a tf.function"
    with pytest.raises(ValueError, match=words):
        model.fit(dataset(mine, known=False), verbose=0)


def check_an_eager_worker_without_a_batch_is_told(world):
    model = model_of(keras)
    model.compile(sok.DistributedOptimizer("sgd"), "mse", run_eagerly=True)
    if world.size > 1:  # the others would wait for it: here all are without
        with pytest.raises(ValueError, match="This worker has had no batch"):
            sok.distributed_model(model, sparse_as_dense_size=0).fit(dataset([], known=False), verbose=0)
