"""Our equivalents of stock optimizers: same numbers, same learning rate, and a refusal where there is none."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.lookup.lookup import lookup_rows
from sok.optimizers import matching_optimizer
from tests.messages import saying
from tests.reference.judge import assert_close
from tests.sok.optimizer_cases import DIM, ROWS, gradient, initial_rows, random_steps, rows_of, table_of

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy
keras_schedules, tf_keras_schedules = keras.optimizers.schedules, tf_keras.optimizers.schedules

# name: (what makes the stock optimizer, our class)
STOCK = {
    "keras.SGD": (lambda: keras.optimizers.SGD(0.1), sok.optimizers.SGD),
    "keras.Adagrad": (lambda: keras.optimizers.Adagrad(0.1, 0.2, epsilon=1e-3), sok.optimizers.Adagrad),
    "keras.Adam": (lambda: keras.optimizers.Adam(0.1, 0.8, 0.99, 1e-4), sok.optimizers.Adam),
    "keras.Adam schedule": (
        lambda: keras.optimizers.Adam(keras_schedules.ExponentialDecay(0.1, 5, 0.5)),
        sok.optimizers.Adam,
    ),
    "keras.Adam function": (lambda: keras.optimizers.Adam(lambda: 0.05), sok.optimizers.Adam),
    "keras.SGD clipnorm": (lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), sok.optimizers.SGD),
    "keras.Adagrad clipvalue": (lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.5), sok.optimizers.Adagrad),
    "tf_keras.SGD": (lambda: tf_keras.optimizers.SGD(0.1), sok.optimizers.SGD),
    "tf_keras.Adagrad": (lambda: tf_keras.optimizers.Adagrad(0.1, 0.2, epsilon=1e-3), sok.optimizers.Adagrad),
    "tf_keras.Adam": (lambda: tf_keras.optimizers.Adam(0.1, 0.8, 0.99, 1e-4), sok.optimizers.Adam),
    "tf_keras.Adam schedule": (
        lambda: tf_keras.optimizers.Adam(tf_keras_schedules.ExponentialDecay(0.1, 5, 0.5)),
        sok.optimizers.Adam,
    ),
    "tf_keras.SGD clipnorm": (lambda: tf_keras.optimizers.SGD(0.1, clipnorm=1.0, clipvalue=0.1), sok.optimizers.SGD),
    "legacy.SGD": (lambda: legacy.SGD(0.1), sok.optimizers.SGD),
    "legacy.SGD decay": (lambda: legacy.SGD(0.1, decay=0.3), sok.optimizers.SGD),
    "legacy.SGD clipvalue": (lambda: legacy.SGD(0.1, clipvalue=0.5), sok.optimizers.SGD),
    "legacy.Adagrad": (lambda: legacy.Adagrad(0.1), sok.optimizers.Adagrad),
    "legacy.Adam": (lambda: legacy.Adam(0.1, 0.8, 0.99, 1e-4), sok.optimizers.Adam),
    "legacy.Adam schedule": (
        lambda: legacy.Adam(tf_keras_schedules.ExponentialDecay(0.1, 5, 0.5)),
        sok.optimizers.Adam,
    ),
    "v1.GradientDescent": (lambda: v1.GradientDescentOptimizer(0.1), sok.optimizers.SGD),
    "v1.Adagrad": (lambda: v1.AdagradOptimizer(0.1, 0.2), sok.optimizers.Adagrad),
    "v1.Adam": (lambda: v1.AdamOptimizer(0.1, 0.8, 0.99, 1e-4), sok.optimizers.Adam),
    "keras.SGD nesterov": (lambda: keras.optimizers.SGD(0.1, nesterov=True), sok.optimizers.SGD),
    "tf_keras.SGD nesterov": (lambda: tf_keras.optimizers.SGD(0.1, nesterov=True), sok.optimizers.SGD),
    "tf_keras.SGD momentum": (lambda: tf_keras.optimizers.SGD(0.1, 0.5), sok.optimizers.SGD),
    "keras.Adam amsgrad": (lambda: keras.optimizers.Adam(0.1, amsgrad=True), sok.optimizers.Adam),
    "keras.Adam weight_decay": (lambda: keras.optimizers.Adam(0.1, weight_decay=0.5), sok.optimizers.AdamW),
    "keras.SGD weight_decay": (lambda: keras.optimizers.SGD(0.1, weight_decay=0.5), sok.optimizers.SGD),
    "tf_keras.SGD weight_decay": (lambda: tf_keras.optimizers.SGD(0.1, 0.5, weight_decay=0.5), sok.optimizers.SGD),
    "keras.AdamW": (lambda: keras.optimizers.AdamW(0.1, 0.5), sok.optimizers.AdamW),
    "keras.AdamW of none": (lambda: keras.optimizers.AdamW(0.1, weight_decay=0.0), sok.optimizers.Adam),
    "tf_keras.AdamW": (lambda: tf_keras.optimizers.AdamW(0.1, 0.5), sok.optimizers.AdamW),
    "tf_keras.RMSprop": (
        lambda: tf_keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5, epsilon=1e-2),
        sok.optimizers.RMSprop,
    ),
    "tf_keras.Adadelta": (lambda: tf_keras.optimizers.Adadelta(0.5, epsilon=1e-4), sok.optimizers.Adadelta),
    "tf_keras.Adamax": (lambda: tf_keras.optimizers.Adamax(0.1), sok.optimizers.Adamax),
    "tf_keras.Nadam": (lambda: tf_keras.optimizers.Nadam(0.1), sok.optimizers.Nadam),
    "tf_keras.Lion": (lambda: tf_keras.optimizers.Lion(0.01), sok.optimizers.Lion),
}


def dense_variable(stock, values):
    return keras.Variable(values) if isinstance(stock, keras.optimizers.Optimizer) else tf.Variable(values)


@pytest.mark.parametrize("name", STOCK)
def test_the_match_does_what_the_stock_optimizer_does_to_a_dense_variable(name, rng):
    make, cls = STOCK[name]
    stock, weights = make(), initial_rows(rng)
    table, dense = table_of(weights), dense_variable(stock, weights)
    ours = matching_optimizer(stock)
    assert type(ours) is cls
    for step in random_steps(rng, 15):
        stock.apply_gradients([(tf.constant(step.dense()), dense)])
        ours.apply_gradients([(gradient(table, step.keys, step.grads), table)])
    assert_close(rows_of(table), dense.numpy(), factor=3.0)  # 15 steps add up
    assert np.abs(rows_of(table) - weights).max() > 0.05


@pytest.mark.parametrize("make", [v1.GradientDescentOptimizer, v1.AdagradOptimizer, v1.AdamOptimizer, legacy.Adam])
def test_the_match_does_so_in_a_session_with_a_rate_that_is_fed(make, rng):
    weights, steps = initial_rows(rng), list(random_steps(rng, 8))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        rate = tf.compat.v1.placeholder(tf.float32, [])
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        grads = tf.compat.v1.placeholder(tf.float32, [None, DIM])
        whole = tf.compat.v1.placeholder(tf.float32, [ROWS, DIM])
        stock = make(rate)
        ours = matching_optimizer(stock)
        table = sok.EmbeddingVariable(DIM, ROWS, name="matched")
        fill = table.assign(np.arange(ROWS), weights)
        dense = tf.compat.v1.get_variable("dense", initializer=weights, use_resource=True)
        loss = tf.reduce_sum(lookup_rows(table, keys) * grads)
        update = ours.apply_gradients([(tf.gradients(loss, table)[0], table)])
        stock_update = stock.apply_gradients([(whole, dense)])
        read = table.sparse_read(np.arange(ROWS))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(fill)
        for number, step in enumerate(steps):
            feed = {rate: 0.1 / (1 + number), keys: step.keys, grads: step.grads, whole: step.dense()}
            session.run(update, feed)
            session.run(stock_update, feed)
        assert_close(session.run(read), session.run(dense), factor=3.0)


# Learning rate and step count.


@pytest.mark.parametrize("make", [keras.optimizers.Adam, tf_keras.optimizers.Adam, legacy.Adam])
def test_rates_assigned_to_either_act_on_both(make):
    stock = make(0.5)
    ours = matching_optimizer(stock)
    assert float(ours.learning_rate.numpy()) == 0.5
    stock.learning_rate = 0.25
    assert float(ours.learning_rate.numpy()) == 0.25
    ours.learning_rate = 0.125
    assert float(stock.learning_rate.numpy()) == 0.125


@pytest.mark.parametrize("make", [keras.optimizers.SGD, legacy.SGD])
def test_a_schedule_that_replaces_a_number_is_followed(make, rng):
    stock = make(0.5)
    ours = matching_optimizer(stock)
    schedules = keras_schedules if make is keras.optimizers.SGD else tf_keras_schedules
    stock.learning_rate = schedules.ExponentialDecay(0.25, 1, 0.5)
    table = table_of(np.zeros((2, DIM), np.float32))
    for _ in range(2):
        ours.apply_gradients([(gradient(table, [1], np.ones((1, DIM), np.float32)), table)])
    assert_close(table.sparse_read([1])[0].numpy(), np.full(DIM, -0.375))


@pytest.mark.parametrize("make", [keras.optimizers.SGD, tf_keras.optimizers.SGD, legacy.SGD])
def test_steps_are_counted_alone_from_where_the_stock_optimizer_is(make):
    stock = make(0.1)
    assert int(matching_optimizer(stock).iterations) == 0
    variable = dense_variable(stock, [1.0])
    for _ in range(3):
        stock.apply_gradients([(tf.ones([1]), variable)])
    ours = matching_optimizer(stock)
    assert int(ours.iterations) == 3
    ours.apply_gradients([])
    assert int(ours.iterations) == 4
    assert int(stock.iterations.numpy()) == 3


@pytest.mark.parametrize("make", [keras.optimizers.Adam, tf_keras.optimizers.Adam, legacy.Adam])
def test_steps_may_be_counted_in_the_stock_optimizer(make):
    stock = make(0.1)
    ours = matching_optimizer(stock, share_iterations=True)
    assert ours.iterations is stock.iterations
    ours.apply_gradients([])
    assert int(stock.iterations.numpy()) == 1


def test_the_match_of_ours_is_itself():
    optimizer = sok.optimizers.LazyAdam()
    assert matching_optimizer(optimizer) is optimizer


def test_the_match_keeps_no_stock_optimizer_alive():
    stock = keras.optimizers.Adam(0.5)
    ours = matching_optimizer(stock, share_iterations=True)
    alive = weakref.ref(stock)
    del stock
    gc.collect()
    assert alive() is None
    assert float(ours.learning_rate.numpy()) == 0.5


def test_a_match_made_in_a_function_outlives_its_trace(rng):
    table, stock, made = table_of(initial_rows(rng)), legacy.SGD(0.5), []

    @tf.function
    def step():
        if not made:
            made.append(matching_optimizer(stock))
        made[0].apply_gradients([(gradient(table, [1], np.ones((1, DIM), np.float32)), table)])

    before = rows_of(table)[1]
    step()
    step()
    assert_close(rows_of(table)[1], before - 1.0)


# Loss scaling.


@pytest.mark.parametrize("make", [tf_keras.optimizers.SGD, legacy.SGD])
def test_a_fixed_loss_scale_is_looked_through(make, rng):
    scaled = tf_keras.mixed_precision.LossScaleOptimizer(make(0.5), dynamic=False, initial_scale=8.0)
    weights = initial_rows(rng)
    table, dense = table_of(weights), tf.Variable(weights)
    ours = matching_optimizer(scaled)
    step = next(s for s in random_steps(rng, 10) if len(s.keys))
    with tf.GradientTape() as tape:
        loss = scaled.get_scaled_loss(tf.reduce_sum(lookup_rows(table, step.keys) * step.grads))
    grads = scaled.get_unscaled_gradients(tape.gradient(loss, [table]))
    ours.apply_gradients([(grads[0], table)])
    scaled.apply_gradients([(tf.constant(step.dense()), dense)])
    assert_close(rows_of(table), dense.numpy())


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam()),
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(legacy.Adam()),
    ],
)
def test_a_dynamic_loss_scale_is_refused(make):
    with pytest.raises(ValueError, match=saying("scale", "embedding_optimizer=sok.optimizers.X")):
        matching_optimizer(make())


# What has no equivalent.


class Custom(keras.optimizers.Adam):
    pass


def excluding(stock):
    stock.exclude_from_weight_decay(var_names=["bias"])
    return stock


NO_MATCH = {
    "momentum`? must": lambda: v1.MomentumOptimizer(0.1, tf.Variable(0.9)),
    "adaptive_epsilon": lambda: tf_keras.optimizers.Adam(adaptive_epsilon=True),
    "weight_decay": lambda: keras.optimizers.RMSprop(weight_decay=0.01),
    "amsgrad": lambda: keras.optimizers.AdamW(amsgrad=True),
    "left out of its `weight_decay`": lambda: excluding(keras.optimizers.AdamW()),
    "use_ema": lambda: tf_keras.optimizers.Adam(use_ema=True),
    "global_clipnorm": lambda: keras.optimizers.Adam(global_clipnorm=1.0),
    "loss_scale_factor": lambda: keras.optimizers.Adam(loss_scale_factor=8.0),
    "gradient_accumulation_steps": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "known are exactly": lambda: keras.optimizers.Adafactor(),
    "Custom .*known are exactly": lambda: Custom(),
    "AdagradDAOptimizer .*known are exactly": lambda: v1.AdagradDAOptimizer(0.1, tf.Variable(0)),
    "global_clipnorm` is 1.0": lambda: legacy.Adam(global_clipnorm=1.0),
    "it clips twice": lambda: legacy.Adam(clipnorm=1.0, clipvalue=1.0),
    "gradient_transformers": lambda: legacy.SGD(gradient_transformers=[lambda pairs: pairs]),
    "gradient_aggregator": lambda: legacy.SGD(gradient_aggregator=lambda pairs: pairs),
    "outside the root": lambda: legacy.Adagrad(0.1, epsilon=0.1),
    "`beta1` .*known now": lambda: v1.AdamOptimizer(0.1, beta1=tf.Variable(0.9)),
    "str": lambda: "adam",
}


@pytest.mark.parametrize("reason", NO_MATCH)
def test_what_cannot_be_matched_says_why_and_what_to_pass(reason):
    with pytest.raises(ValueError, match=f"(?s)(?:{reason}).*embedding_optimizer=sok.optimizers.X"):
        matching_optimizer(NO_MATCH[reason]())
