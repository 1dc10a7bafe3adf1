"""Learning rates of every kind, and changing them at any step."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.lookup.lookup import lookup_rows
from sok.optimizers.learning_rate import as_learning_rate
from tests.sok.optimizer_cases import DIM, stepper, table_of

ONES = np.ones((1, DIM), np.float32)


def rates_used(optimizer, steps, between=lambda number: None, compiled=True):
    """What plain gradient descent with a gradient of 1 takes off the row in each step."""
    table = table_of(np.zeros((1, DIM), np.float32), "rates")
    run = stepper(optimizer, table)
    run = run if compiled else run.python_function
    used, before = [], 0.0
    for number in range(steps):
        between(number)
        run(np.zeros(1, np.int64), ONES)
        after = float(table.sparse_read([0])[0, 0])
        used.append(before - after)
        before = after
    return np.array(used)


def halving(step):
    return 0.5 ** tf.cast(step, tf.float32)


KINDS = {
    "integer": (1, [1, 1, 1]),
    "numpy": (np.float32(0.25), [0.25] * 3),
    "eager tensor": (tf.constant(0.25), [0.25] * 3),
    "keras schedule": (keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, 0.25]), [1, 0.5, 0.25]),
    "tf_keras schedule": (
        tf_keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, 0.25]),
        [1, 0.5, 0.25],
    ),
    "function of the step": (halving, [1, 0.5, 0.25]),
    "partial function of the step": (functools.partial(lambda base, step: base * halving(step), 2.0), [2, 1, 0.5]),
    "function of nothing": (lambda: 0.125, [0.125] * 3),
    "function with a default": (lambda rate=0.5: rate, [0.5] * 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_learning_rate_is_used_at_its_step(kind):
    rate, expected = KINDS[kind]
    np.testing.assert_allclose(rates_used(sok.optimizers.SGD(rate), 3), expected, rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_rate_set_between_steps_acts_at_once(compiled):
    optimizer = sok.optimizers.SGD(1.0)

    def between(number):
        optimizer.learning_rate = 0.5**number

    np.testing.assert_allclose(rates_used(optimizer, 3, between, compiled), [1, 0.5, 0.25])
    assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable], ids=["tf", "keras"])
def test_a_variable_of_the_users_is_followed_and_set(make):
    variable = make(1.0)
    optimizer = sok.optimizers.SGD(variable)
    assert optimizer.learning_rate is variable
    np.testing.assert_allclose(rates_used(optimizer, 3, lambda number: variable.assign(2.0 + number)), [2, 3, 4])
    optimizer.learning_rate = 0.75
    assert float(variable.numpy()) == 0.75


def test_a_function_of_nothing_may_read_a_variable():
    variable = tf.Variable(1.0)
    optimizer = sok.optimizers.SGD(lambda: variable * 0.5)
    np.testing.assert_allclose(rates_used(optimizer, 2, lambda number: variable.assign(2.0 + number)), [1, 1.5])


def test_the_rate_of_a_schedule_is_the_present_one_and_cannot_be_set_to_a_number():
    optimizer = sok.optimizers.SGD(halving)
    rates_used(optimizer, 2)
    assert float(optimizer.learning_rate) == 0.25
    with pytest.raises(TypeError, match="made with the schedule function"):
        optimizer.learning_rate = 0.1
    optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.1)
    assert float(optimizer.learning_rate) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("rate", "error", "text"),
    [
        (-1.0, ValueError, "not negative. Received: -1.0"),
        (1e300, ValueError, "finite in float32.*Received: 1e\\+300"),
        pytest.param(10**400, ValueError, "finite in float32.*Received: inf", id="10**400"),
        (np.float64(1e39), ValueError, "finite in float32"),
        (float("nan"), ValueError, "Received: nan"),
        ("0.1", TypeError, "Received: '0.1'"),
        (True, TypeError, "Received: True"),
        (None, TypeError, "Received: None"),
        (lambda a, b: a, TypeError, "needs 2 arguments"),
    ],
)
def test_what_is_no_learning_rate_is_an_error(rate, error, text):
    with pytest.raises(error, match=text):
        sok.optimizers.SGD(rate)


def test_a_bad_rate_set_later_changes_nothing():
    optimizer = sok.optimizers.SGD(0.5)
    with pytest.raises(ValueError, match="not negative"):
        optimizer.learning_rate = -0.5
    assert float(optimizer.learning_rate) == 0.5


def test_a_tensor_of_a_function_being_traced_is_an_error():
    @tf.function
    def make(rate):
        sok.optimizers.SGD(rate)

    with pytest.raises(TypeError, match="tensor of a function .*traced"):
        make(tf.constant(0.5))


@pytest.fixture
def graph():
    """A v1 graph with a session, and train(optimizer): the op of a step with a gradient of 1, and a read of the row."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:

        def train(optimizer):
            table = sok.EmbeddingVariable(1, 4, initializer="zeros", name="in_graph")
            loss = tf.reduce_sum(lookup_rows(table, tf.constant([2], tf.int64)))
            update = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)])
            read = table.sparse_read([2])[0, 0]
            session.run(tf.compat.v1.global_variables_initializer())
            return update, read

        yield session, train


def test_a_placeholder_feeds_the_rate_of_a_session(graph):
    session, train = graph
    rate = tf.compat.v1.placeholder(tf.float32, [])
    optimizer = sok.optimizers.SGD(rate)
    assert optimizer.learning_rate is rate
    update, read = train(optimizer)
    session.run(update, {rate: 0.5})
    session.run(update, {rate: 0.25})
    assert session.run(read) == -0.75
    with pytest.raises(TypeError, match="made with the tensor"):
        optimizer.learning_rate = 0.1


def test_a_variable_holds_the_rate_of_a_session(graph):
    session, train = graph
    rate = tf.compat.v1.get_variable("rate", initializer=0.5)
    optimizer = sok.optimizers.SGD(rate)
    update, read = train(optimizer)
    session.run(update)
    session.run(rate.assign(0.25))
    session.run(update)
    assert session.run(read) == -0.75
    with pytest.raises(RuntimeError, match="in the session"):
        optimizer.learning_rate = 0.1


def test_a_number_in_a_session_is_a_constant_that_says_so(graph):
    session, train = graph
    optimizer = sok.optimizers.SGD(0.5)
    optimizer.learning_rate = 0.25
    update, read = train(optimizer)
    session.run(update)
    assert session.run(read) == -0.25
    with pytest.raises(RuntimeError, match="pass a tf.compat.v1.Variable, a placeholder"):
        optimizer.learning_rate = 0.1


def test_a_schedule_runs_in_a_session(graph):
    session, train = graph
    optimizer = sok.optimizers.SGD(halving)
    update, read = train(optimizer)
    for _ in range(3):
        session.run(update)
    assert session.run(read) == -1.75


def test_a_learning_rate_object_is_taken_as_it_is():
    rate = as_learning_rate(0.5)
    assert as_learning_rate(rate) is rate
