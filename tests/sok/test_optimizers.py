"""Every rule against NumPy and stock Keras, in eager mode, tf.function and a v1 Session."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from tests.messages import saying
from tests.reference import optimizers as reference
from tests.reference.judge import assert_close
from tests.sok.optimizer_cases import (
    DIM,
    ROWS,
    empty_table,
    gradient,
    initial_rows,
    random_steps,
    rows_of,
    stepper,
    table_of,
)

RATE = 0.05
MAKE = {
    "SGD": lambda: sok.optimizers.SGD(RATE),
    "Adagrad": lambda: sok.optimizers.Adagrad(RATE),
    "Adam": lambda: sok.optimizers.Adam(RATE),
    "LazyAdam": lambda: sok.optimizers.LazyAdam(RATE),
}
STOCK = {"SGD": keras.optimizers.SGD, "Adagrad": keras.optimizers.Adagrad, "Adam": keras.optimizers.Adam}
# Float32 steps against float64 ones: rounding of 20 to 40 steps adds up.
LONG_RUN = 3.0


def expected_rows(rule, weights, steps):
    """What the rule makes of a dense table, in NumPy."""
    weights = weights.astype(np.float64)
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    accumulator = np.full_like(weights, 0.1)
    for number, step in enumerate(steps, start=1):
        grads = step.dense().astype(np.float64)
        if rule == "SGD":
            weights = reference.sgd(weights, grads, RATE)
        elif rule == "Adagrad":
            weights, accumulator = reference.adagrad(weights, accumulator, grads, RATE, 1e-7)
        elif rule == "Adam":
            weights, m, v = reference.adam(weights, m, v, grads, RATE, 0.9, 0.999, 1e-7, number)
        else:
            touched = np.isin(np.arange(ROWS), step.keys)
            weights, m, v = reference.lazy_adam(weights, m, v, grads, touched, RATE, 0.9, 0.999, 1e-7, number)
    return weights


@pytest.fixture(params=["eager", "function", "session"])
def train(request):
    """train(make_optimizer, weights, steps): the rows after those steps, in one of the three modes."""

    def in_session(make, weights, steps):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = empty_table()
            fill = table.assign(np.arange(ROWS), weights)
            keys = tf.compat.v1.placeholder(tf.int64, [None])
            grads = tf.compat.v1.placeholder(tf.float32, [None, DIM])
            loss = tf.reduce_sum(lookup_rows(table, keys) * grads)
            optimizer = make()
            update = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)])
            read = table.sparse_read(np.arange(ROWS))
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(fill)
            for step in steps:
                session.run(update, {keys: step.keys, grads: step.grads})
            assert session.run(optimizer.iterations) == len(steps)
            return session.run(read)

    def otherwise(make, weights, steps):
        table, optimizer = table_of(weights), make()
        run = stepper(optimizer, table)
        for step in steps:
            (run if request.param == "function" else run.python_function)(step.keys, step.grads)
        assert int(optimizer.iterations) == len(steps)
        return rows_of(table)

    return in_session if request.param == "session" else otherwise


@pytest.mark.parametrize("rule", MAKE)
def test_rows_are_those_of_the_rule_on_a_dense_table(train, rule, rng):
    weights, steps = initial_rows(rng), list(random_steps(rng, 25))
    actual = train(MAKE[rule], weights, steps)
    assert_close(actual, expected_rows(rule, weights, steps), factor=LONG_RUN)
    assert np.abs(actual - weights).max() > RATE / 2


@pytest.mark.parametrize("rule", STOCK)
def test_rows_are_those_of_stock_keras_on_a_dense_variable(rule, rng):
    weights, steps = initial_rows(rng), list(random_steps(rng, 40))
    dense, stock = keras.Variable(weights), STOCK[rule](RATE)
    table, optimizer = table_of(weights), MAKE[rule]()
    run = stepper(optimizer, table)
    for step in steps:
        stock.apply([tf.constant(step.dense())], [dense])
        run(step.keys, step.grads)
    assert_close(rows_of(table), dense.numpy(), factor=LONG_RUN)


@pytest.mark.parametrize("rule", MAKE)
def test_duplicate_keys_update_as_their_summed_gradient(rule, rng):
    weights, grads = initial_rows(rng), rng.normal(size=(3, DIM)).astype(np.float32)
    twice, once = table_of(weights, "twice"), table_of(weights, "once")
    for table, keys, values in ((twice, [4, 7, 4], grads), (once, [4, 7], [grads[0] + grads[2], grads[1]])):
        optimizer = MAKE[rule]()
        optimizer.apply_gradients([(gradient(table, keys, values), table)])
    np.testing.assert_array_equal(rows_of(twice), rows_of(once))


@pytest.mark.parametrize("rule", ["SGD", "Adagrad", "LazyAdam"])
def test_rows_outside_the_batch_keep_every_bit(rule, rng):
    weights = initial_rows(rng)
    table, optimizer = table_of(weights), MAKE[rule]()
    optimizer.apply_gradients([(gradient(table, [0, 1], np.ones((2, DIM))), table)])
    after_first = rows_of(table)
    optimizer.apply_gradients([(gradient(table, [1], np.ones((1, DIM))), table)])
    others = np.arange(ROWS) != 1
    np.testing.assert_array_equal(rows_of(table)[others], after_first[others])
    assert not np.array_equal(rows_of(table)[1], after_first[1])


def test_two_lookups_in_one_step_add_their_gradients(rng):
    weights = initial_rows(rng)
    table, optimizer = table_of(weights), sok.optimizers.Adagrad(RATE)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup_rows(table, [2, 3])) + 2.0 * tf.reduce_sum(lookup_rows(table, [3]))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    grads = np.zeros((ROWS, DIM))
    grads[2], grads[3] = 1.0, 3.0
    expected, _ = reference.adagrad(weights, np.full_like(weights, 0.1), grads, RATE, 1e-7)
    assert_close(rows_of(table), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_other_float_types_are_cast(dtype, rng):
    weights = initial_rows(rng)
    table, optimizer = table_of(weights), sok.optimizers.SGD(0.5)
    grad = gradient(table, [1], np.full((1, DIM), 0.25, np.float32))
    optimizer.apply_gradients([(tf.IndexedSlices(tf.cast(grad.values, dtype), tf.cast(grad.indices, tf.int32)), table)])
    expected = weights.copy()
    expected[1] -= 0.125
    np.testing.assert_array_equal(rows_of(table), expected)


@pytest.mark.parametrize("scale", [0.25, tf.constant(0.25)], ids=["number", "tensor"])
def test_gradient_scale_multiplies_gradients_before_clipping(scale, rng):
    weights = initial_rows(rng)
    table, optimizer = table_of(weights), sok.optimizers.SGD(1.0, clipvalue=1.5)
    optimizer.apply_gradients([(gradient(table, [1, 2], [[4.0] * 3, [8.0] * 3]), table)], gradient_scale=scale)
    expected = weights.copy()
    expected[1] -= 1.0
    expected[2] -= 1.5
    assert_close(rows_of(table), expected)


def test_pairs_without_gradient_are_left_out(rng):
    weights = initial_rows(rng)
    table, unused = table_of(weights, "used"), table_of(weights, "unused")
    optimizer = sok.optimizers.Adam(RATE)
    optimizer.apply_gradients([(None, unused), (gradient(table, [1], np.ones((1, DIM))), table)])
    np.testing.assert_array_equal(rows_of(unused), weights)
    assert not np.array_equal(rows_of(table), weights)


def test_a_step_without_any_gradient_warns_and_counts(rng):
    table, optimizer = table_of(initial_rows(rng)), sok.optimizers.SGD()
    with pytest.warns(UserWarning, match=saying("None of the embedding variables", "'table")):
        optimizer.apply_gradients([(None, table)])
    assert int(optimizer.iterations) == 1


def test_several_tables_of_different_widths_train_in_one_call():
    narrow = sok.EmbeddingVariable(1, 8, initializer="ones", name="narrow")
    wide = sok.EmbeddingVariable(5, 8, initializer="ones", name="wide")
    optimizer = sok.optimizers.SGD(0.5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup_rows(narrow, [3])) + tf.reduce_sum(lookup_rows(wide, [4]))
    grads = tape.gradient(loss, [narrow, wide])
    optimizer.apply_gradients(zip(grads, [narrow, wide], strict=True))
    np.testing.assert_array_equal(narrow.sparse_read([3]), [[0.5]])
    np.testing.assert_array_equal(wide.sparse_read([4]), [[0.5] * 5])


@pytest.mark.parametrize("rule", MAKE)
def test_two_optimizers_on_one_table_keep_their_slots_apart(rule, rng):
    weights = initial_rows(rng)
    steps = list(random_steps(rng, 20))
    # The second optimizer has a rate of zero: with slots of its own it changes nothing for the first.
    table, alone = table_of(weights, "shared"), table_of(weights, "alone")
    first, still, only = MAKE[rule](), MAKE[rule](), MAKE[rule]()
    still.learning_rate = 0.0
    assert first.slot_set != still.slot_set
    for step in steps:
        first.apply_gradients([(gradient(table, step.keys, step.grads), table)])
        still.apply_gradients([(gradient(table, step.keys, -step.grads), table)])
        only.apply_gradients([(gradient(alone, step.keys, step.grads), alone)])
    assert_close(rows_of(table), rows_of(alone))
    if rule != "SGD":
        keys, slots, _ = table.slots(first.slot_set)
        _, others, _ = table.slots(still.slot_set)
        assert not np.allclose(slots, others) or rule == "Adagrad"
        assert_close(slots.numpy(), alone.slots(only.slot_set)[1].numpy())


def test_optimizers_of_different_rules_share_a_table(rng):
    weights = initial_rows(rng)
    table = table_of(weights)
    adagrad, sgd = sok.optimizers.Adagrad(RATE), sok.optimizers.SGD(RATE)
    accumulator, expected = np.full_like(weights, 0.1), weights.astype(np.float64)
    for step in random_steps(rng, 10):
        adagrad.apply_gradients([(gradient(table, step.keys, step.grads), table)])
        sgd.apply_gradients([(gradient(table, step.keys, step.grads), table)])
        expected, accumulator = reference.adagrad(expected, accumulator, step.dense(), RATE, 1e-7)
        expected = reference.sgd(expected, step.dense(), RATE)
    assert_close(rows_of(table), expected)


def test_a_step_in_a_function_may_be_its_result(rng):
    table, optimizer = table_of(initial_rows(rng)), sok.optimizers.SGD(RATE)

    @tf.function
    def step():
        return optimizer.apply_gradients([(gradient(table, [1], np.ones((1, DIM), np.float32)), table)])

    assert step() is None
    assert int(optimizer.iterations) == 1


def test_a_whole_loop_of_steps_compiles(rng):
    weights = initial_rows(rng)
    table, optimizer = table_of(weights), sok.optimizers.SGD(RATE)

    @tf.function
    def train(count):
        for _ in tf.range(count):
            optimizer.apply_gradients([(gradient(table, [1], np.ones((1, DIM), np.float32)), table)])

    train(tf.constant(4))
    assert_close(rows_of(table)[1], weights[1] - 4 * RATE)
    assert int(optimizer.iterations) == 4


def test_lazy_adam_optimizer_takes_the_arguments_of_tf_contrib(rng):
    weights = initial_rows(rng)
    ours, contrib = table_of(weights, "ours"), table_of(weights, "contrib")
    global_step = tf.Variable(5, dtype=tf.int64)
    optimizers = (
        (ours, sok.optimizers.LazyAdam(RATE, 0.8, 0.99, epsilon=1e-8)),
        (contrib, sok.optimizers.LazyAdamOptimizer(RATE, beta1=0.8, beta2=0.99)),
    )
    for step in random_steps(rng, 10):
        for table, optimizer in optimizers:
            more = {"global_step": global_step} if table is contrib else {}
            optimizer.apply_gradients([(gradient(table, step.keys, step.grads), table)], **more)
    np.testing.assert_array_equal(rows_of(ours), rows_of(contrib))
    assert int(global_step) == 15


def test_lazy_adam_optimizer_adds_to_a_global_step_in_a_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(1, 4, initializer="ones", name="stepped")
        global_step = tf.compat.v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(lookup_rows(table, tf.constant([2], tf.int64)))
        optimizer = sok.optimizers.LazyAdamOptimizer(RATE)
        update = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)], global_step=global_step)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(update)
        assert session.run([global_step, optimizer.iterations]) == [1, 1]
        assert session.run(table.sparse_read([2]))[0, 0] == pytest.approx(1 - RATE, rel=1e-5)
