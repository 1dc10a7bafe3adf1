"""A table that a training step looks up and nobody trains is told of, once; one that is to stay as it is, is not."""

import warnings

import keras
import pytest
import tensorflow as tf

import sok

TABLES = {
    "EmbeddingVariable": lambda **options: sok.EmbeddingVariable(4, 100, **options),
    "Variable": lambda **options: sok.Variable(shape=(100, 4), **options),
    "DynamicVariable": lambda **options: sok.DynamicVariable(dimension=4, **options),
}
OPTIMIZERS = {
    "stock": lambda: keras.optimizers.Adam(0.1),
    "distributed": lambda: sok.DistributedOptimizer(keras.optimizers.SGD(0.1)),
    "v2": lambda: sok.OptimizerWrapper(keras.optimizers.SGD(0.1)),
}
ENOUGH = 40  # steps


def look_up(table, **options):
    return tf.reduce_sum(sok.group_embedding_lookup([table], [tf.constant([1, 2])], **options)[0])


def in_mode(mode, step):
    if mode == "eager":
        return step
    traced = tf.function(step)
    return tf.function(lambda: traced()) if mode == "nested" else traced


@pytest.mark.parametrize("mode", ["eager", "function", "nested"])
@pytest.mark.parametrize("kind, optimizer", zip(TABLES, OPTIMIZERS, strict=True))
@pytest.mark.parametrize("asks", [False, True])
def test_a_step_that_leaves_a_table_as_it_is_says_so_once(mode, kind, optimizer, asks):
    table, weight, optimizer = TABLES[kind](), tf.Variable(1.0), OPTIMIZERS[optimizer]()

    def step():
        with tf.GradientTape() as tape:
            loss = look_up(table) * weight
        gradients = tape.gradient(loss, [weight, *([table] if asks else [])])
        optimizer.apply_gradients([(gradients[0], weight)])

    step = in_mode(mode, step)
    with pytest.warns(UserWarning) as told:
        for _ in range(ENOUGH):
            step()
    (text,) = [str(w.message) for w in told if "tape" in str(w.message)]
    for part in (f"'{table.table_name}'", "apply_gradients", "trainable=False", "training=False"):
        assert part in text


def steps_that_are_right():
    weight, optimizer = tf.Variable(1.0), sok.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def trains(table):
        with tf.GradientTape() as tape:
            loss = look_up(table) * weight
        optimizer.apply_gradients(zip(tape.gradient(loss, [weight, table]), [weight, table], strict=True))

    def without_inserting(table):
        with tf.GradientTape() as tape:
            loss = look_up(table, training=False) * weight
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    def without_a_tape(table):
        weight.assign_sub(look_up(table))

    def only_gradients(table):  # applied elsewhere, maybe
        with tf.GradientTape() as tape:
            loss = look_up(table) * weight
        return tape.gradient(loss, weight)

    def by_hand(table):
        with tf.GradientTape() as tape:
            loss = look_up(table) * weight
        slices = tape.gradient(loss, table)
        table.assign([1, 2], 1.0 - slices.values)

    return {f.__name__: f for f in (trains, without_inserting, without_a_tape, only_gradients, by_hand)}


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("kind", steps_that_are_right())
def test_what_is_right_is_told_of_by_nobody(mode, kind):
    table, step = TABLES["EmbeddingVariable"](), steps_that_are_right()[kind]
    run = in_mode(mode, lambda: step(table))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(ENOUGH if (mode, kind) != ("eager", "only_gradients") else 8):
            run()


@pytest.mark.parametrize("kind", TABLES)
def test_frozen_tables_are_told_of_by_nobody(kind):
    table, weight = TABLES[kind](trainable=False), tf.Variable(1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = look_up(table) * weight
        weight.assign_sub(tape.gradient(loss, weight))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (step, tf.function(step)):
            for _ in range(ENOUGH):
                run()


def test_a_tape_around_a_function_trains(call):
    table, weight = TABLES["EmbeddingVariable"](), tf.Variable(1.0)
    optimizer, forward = sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), tf.function(look_up)

    def step():
        with tf.GradientTape() as tape:
            loss = forward(table) * weight
        optimizer.apply_gradients(zip(tape.gradient(loss, [weight, table]), [weight, table], strict=True))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(step)
    assert int(table.step) == 1
