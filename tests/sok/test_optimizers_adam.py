"""Adam at the cost of touched rows is stock Adam on the dense table, to the end of long runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from tests.sok.optimizer_cases import DIM, initial_rows, random_steps, rows_of, stepper, table_of

ROWS, STEPS = 60, 300
# What is promised for 300 steps. Rows are of size 1; elements that cross zero are judged against a tenth of that.
RELATIVE = 1e-5


def assert_within(actual, expected):
    error = np.abs(actual - expected) / np.maximum(np.abs(expected), 0.1)
    assert error.max() <= RELATIVE, f"relative error {error.max():.2e} in row {error.max(axis=1).argmax()}"


class Pair:
    """Our Adam on a table beside stock Adam on a dense variable."""

    def __init__(self, weights, make_rate, **hyper):
        self.table, self.dense = table_of(weights, "replayed"), keras.Variable(weights)
        self.ours = sok.optimizers.Adam(make_rate(), **hyper)
        self.stock = keras.optimizers.Adam(make_rate(), **hyper)
        self.stock.build([self.dense])
        self.run = stepper(self.ours, self.table)
        self.run_stock = tf.function(lambda grad: self.stock.apply([grad], [self.dense]))

    def step(self, step):
        self.run(step.keys, step.grads)
        self.run_stock(tf.constant(step.dense(ROWS)))

    def assert_same(self, keys=slice(None)):
        assert_within(rows_of(self.table, ROWS)[keys], self.dense.numpy()[keys])


@pytest.mark.parametrize(
    "make_rate",
    [
        lambda: 0.02,
        lambda: keras.optimizers.schedules.ExponentialDecay(0.05, 50, 0.7),
        lambda: keras.optimizers.schedules.PiecewiseConstantDecay([100, 200], [0.02, 0.0, 0.01]),
    ],
    ids=["constant", "exponential", "stopped for a while"],
)
def test_300_steps_on_skewed_keys_are_stock_adam(make_rate, rng):
    pair = Pair(initial_rows(rng, ROWS), make_rate)
    for step in random_steps(rng, STEPS, ROWS):
        pair.step(step)
    pair.assert_same()


def test_300_steps_with_assigned_rates_and_reads_in_between_are_stock_adam(rng):
    pair = Pair(initial_rows(rng, ROWS), lambda: 0.02)
    for number, step in enumerate(random_steps(rng, STEPS, ROWS)):
        if number % 60 == 30:
            rate = float(rng.uniform(0.001, 0.05))
            pair.ours.learning_rate = rate
            pair.stock.learning_rate = rate
        pair.step(step)
        if number % 25 == 7:
            some = rng.choice(ROWS, 5)
            found = lookup_rows(pair.table, some).numpy()
            assert_within(found, pair.dense.numpy()[some])
    pair.assert_same()


def test_other_hyperparameters_are_stock_adam(rng):
    pair = Pair(initial_rows(rng, ROWS), lambda: 0.03, beta_1=0.5, beta_2=0.9, epsilon=1e-3)
    for step in random_steps(rng, 100, ROWS):
        pair.step(step)
    pair.assert_same()


def test_exported_rows_and_slots_have_decayed(rng):
    pair = Pair(initial_rows(rng, ROWS), lambda: 0.02)
    for step in random_steps(rng, 50, ROWS):
        pair.step(step)
    keys, rows = (part.numpy() for part in pair.table.export())
    assert_within(rows, pair.dense.numpy()[keys])
    keys, slots, _ = (part.numpy() for part in pair.table.slots(pair.ours.slot_set))
    momentum, velocity = (variable.numpy()[keys] for variable in pair.stock.variables[2:4])
    np.testing.assert_allclose(slots[:, :DIM], momentum, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slots[:, DIM:], velocity, rtol=1e-4, atol=1e-6)


def test_steps_without_keys_decay_every_row(rng):
    pair = Pair(initial_rows(rng, ROWS), lambda: 0.1)
    first, *_ = random_steps(rng, 1, ROWS)
    first.keys, first.grads = np.arange(ROWS), rng.normal(size=(ROWS, DIM)).astype(np.float32)
    pair.step(first)
    before = rows_of(pair.table, ROWS)
    first.keys, first.grads = first.keys[:0], first.grads[:0]
    for _ in range(30):
        pair.step(first)
    assert np.abs(rows_of(pair.table, ROWS) - before).min() > 0.1
    pair.assert_same()


def test_a_key_that_appears_late_starts_without_momentum(rng):
    pair = Pair(initial_rows(rng, ROWS), lambda: 0.05)
    for step in random_steps(rng, 40, 10):
        pair.step(step)
    late = ROWS - 1
    pair.step(type(step)(np.array([late]), np.ones((1, DIM), np.float32)))
    for step in random_steps(rng, 10, 10):
        pair.step(step)
    pair.assert_same([late])


def test_lazy_adam_is_not_stock_adam_on_skewed_keys(rng):
    weights = initial_rows(rng, ROWS)
    adam, lazy = table_of(weights, "adam"), table_of(weights, "lazy")
    steppers = [stepper(sok.optimizers.Adam(0.05), adam), stepper(sok.optimizers.LazyAdam(0.05), lazy)]
    for step in random_steps(rng, 30, ROWS):
        for run in steppers:
            run(step.keys, step.grads)
    assert np.abs(rows_of(adam, ROWS) - rows_of(lazy, ROWS)).max() > 0.05
