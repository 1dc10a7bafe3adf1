"""OptimizerScope: stock optimizers train tables inside it, and nothing is left behind."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.compat import optimizer_scope
from sok.lookup.lookup import lookup_rows
from tests.messages import saying
from tests.reference.judge import assert_close
from tests.sok.optimizer_cases import DIM, gradient, initial_rows, random_steps, rows_of, table_of

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy
MAKE = {
    "keras": lambda: keras.optimizers.Adam(0.1),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: legacy.Adam(0.1),
    "v1": lambda: v1.AdamOptimizer(0.1),
}
METHODS = [
    (cls, name)
    for root in (keras.optimizers.Adam, tf_keras.optimizers.Adam, legacy.Adam, v1.AdamOptimizer)
    for cls in root.__mro__
    for name in ("apply_gradients", "apply")
    if name in vars(cls)
]
ONES = np.ones((1, DIM), np.float32)


@pytest.fixture(autouse=True)
def methods_are_as_they_were():
    before = [vars(cls)[name] for cls, name in METHODS]
    yield
    assert [vars(cls)[name] for cls, name in METHODS] == before
    assert optimizer_scope._patch._replaced == {}


def variable_of(stock, values):
    return keras.Variable(values) if isinstance(stock, keras.optimizers.Optimizer) else tf.Variable(values)


def iterations_of(stock):
    return int(stock.iterations.numpy())


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("kind", MAKE)
def test_tables_train_as_dense_variables_do_without_a_scope(kind, mixed, call, rng):
    weights = initial_rows(rng)
    stock, judge = MAKE[kind](), MAKE[kind]()
    table, dense = table_of(weights), variable_of(judge, weights)
    other, judge_other = variable_of(stock, [1.0, 2.0]), variable_of(judge, [1.0, 2.0])
    steps = list(random_steps(rng, 6))
    # Stock optimizers want to know their variables before the first step, and make what they need outside of functions.
    if kind in ("keras", "tf_keras"):
        stock.build([other])
        judge.build([dense, judge_other])

    def train():
        for step in steps:
            pairs = [(gradient(table, step.keys, step.grads), table)]
            stock.apply_gradients(pairs + [(tf.ones([2]), other)] * mixed)

    with sok.OptimizerScope([table, other]):
        call(train) if kind != "v1" else train()
    for step in steps:
        judge.apply_gradients([(tf.constant(step.dense()), dense)] + [(tf.ones([2]), judge_other)] * mixed)
    assert_close(rows_of(table), dense.numpy(), factor=3.0)  # six steps add up
    assert_close(other.numpy(), judge_other.numpy())
    if kind != "v1":
        assert iterations_of(stock) == iterations_of(judge) == 6


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("make", [v1.AdamOptimizer, v1.GradientDescentOptimizer, legacy.Adam])
def test_the_op_of_a_session_updates_tables_others_and_the_global_step(make, mixed, rng):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(1, 4, initializer="ones", name="scoped")
        dense = tf.compat.v1.get_variable("dense", initializer=[1.0], use_resource=True)
        global_step = v1.get_or_create_global_step()
        row = lookup_rows(table, tf.constant([2], tf.int64))
        loss = tf.reduce_sum(row) + tf.reduce_sum(dense)
        variables = [table, dense] if mixed else [table]
        pairs = list(zip(tf.gradients(loss, variables), variables, strict=True))
        with sok.OptimizerScope(variables):
            more = {} if make is legacy.Adam else {"global_step": global_step}
            update = make(0.25).apply_gradients(pairs, **more)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(2):
            session.run(update)
        found = session.run([table.sparse_read([2])[0, 0], dense[0], global_step])
        # A constant gradient of 1: every rule here takes 0.25 a step. Adam's 1 - beta_2^t has few digits in float32.
        expected = [0.5, 0.5 if mixed else 1.0, 2 if more else 0]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_v1_minimize_works_inside(rng):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(1, 4, initializer="ones", name="minimized")
        dense = tf.compat.v1.get_variable("dense", initializer=[1.0])
        loss = tf.reduce_sum(lookup_rows(table, tf.constant([2], tf.int64))) + tf.reduce_sum(dense)
        with sok.OptimizerScope(tf.compat.v1.trainable_variables()):
            update = v1.GradientDescentOptimizer(0.5).minimize(loss)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(update)
        assert session.run([table.sparse_read([2])[0, 0], dense[0]]) == [0.5, 0.5]


def test_keras_3_apply_with_and_without_variables(rng):
    weights = initial_rows(rng)
    table, dense = table_of(weights), keras.Variable([1.0])
    stock = keras.optimizers.SGD(0.5)
    with sok.OptimizerScope([table, dense]):
        stock.apply([gradient(table, [1], ONES), tf.ones([1])], [table, dense])
        stock.apply([tf.ones([1])])
    assert_close(rows_of(table)[1], weights[1] - 0.5)
    assert float(dense.numpy()[0]) == 0.0
    assert iterations_of(stock) == 2


def test_others_without_gradient_leave_counting_to_us(rng):
    table, dense = table_of(initial_rows(rng)), keras.Variable([1.0])
    stock = keras.optimizers.SGD(0.5)
    with sok.OptimizerScope([table, dense]):
        result = stock.apply_gradients([(gradient(table, [1], ONES), table), (None, dense)])
    assert iterations_of(stock) == 1
    assert result is stock.iterations


def test_the_stock_optimizers_rate_is_ours(rng):
    weights = initial_rows(rng)
    table, stock = table_of(weights), keras.optimizers.SGD(0.5)
    with sok.OptimizerScope([table]):
        stock.apply_gradients([(gradient(table, [1], ONES), table)])
        stock.learning_rate = 0.25
        stock.apply_gradients([(gradient(table, [1], ONES), table)])
    assert_close(rows_of(table)[1], weights[1] - 0.75)


def test_slots_live_as_long_as_the_stock_optimizer_over_several_scopes(rng):
    table, stock = table_of(initial_rows(rng)), keras.optimizers.Adam(0.5)
    for _ in range(2):
        with sok.OptimizerScope((table,)):
            stock.apply_gradients([(gradient(table, [1], ONES), table)])
    matched = optimizer_scope._matched[stock]
    keys, slots, _ = (part.numpy() for part in table.slots(matched.slot_set))
    assert_close(slots[keys == 1][0, 0], np.float32(0.19))  # 0.1 + 0.9 * 0.1


def test_our_optimizers_and_dense_only_calls_are_not_touched(rng):
    weights = initial_rows(rng)
    table, dense = table_of(weights), keras.Variable([1.0])
    with sok.OptimizerScope([table]):
        sok.optimizers.SGD(0.5).apply_gradients([(gradient(table, [1], ONES), table)])
        keras.optimizers.SGD(0.5).apply_gradients([(tf.ones([1]), dense)])
    assert_close(rows_of(table)[1], weights[1] - 0.5)
    assert float(dense.numpy()[0]) == 0.5


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("kind", ["keras", "tf_keras", "legacy"])
def test_a_loss_scaler_leaves_out_steps_that_are_not_finite(kind, mixed, call, rng):
    weights = initial_rows(rng)
    library = keras.optimizers if kind == "keras" else tf_keras.mixed_precision
    scaler = library.LossScaleOptimizer(MAKE[kind](), initial_scale=4.0)
    table, other = table_of(weights), variable_of(scaler, [1.0, 2.0])

    def train():
        for value in (4.0, np.inf):
            grad = gradient(table, [1], ONES * value)
            pairs = [(grad, table)] + [(tf.fill([2], value), other)] * mixed
            if kind != "keras":
                unscaled = scaler.get_unscaled_gradients([grad for grad, _ in pairs])
                pairs = [(grad, variable) for grad, (_, variable) in zip(unscaled, pairs, strict=True)]
            scaler.apply_gradients(pairs)

    with sok.OptimizerScope([table, other]):
        call(train)
    assert_close(rows_of(table)[1], weights[1] - 0.1, factor=10.0)  # Adam's 1 - beta_2^t has few digits
    np.testing.assert_allclose(other.numpy(), np.array([0.9, 1.9] if mixed else [1.0, 2.0]), rtol=1e-4)
    assert float(scaler.dynamic_scale if kind == "keras" else scaler.loss_scale) == 2.0


def test_a_loss_scaler_under_a_strategy_hands_on_in_another_thread(rng):
    weights = initial_rows(rng)
    table = table_of(weights)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        scaler = tf_keras.mixed_precision.LossScaleOptimizer(legacy.SGD(0.5), dynamic=False, initial_scale=4.0)

    def train():
        with sok.OptimizerScope([table]):
            scaler.apply_gradients([(gradient(table, [1], ONES), table)], experimental_aggregate_gradients=False)

    strategy.run(tf.function(train))
    assert_close(rows_of(table)[1], weights[1] - 0.5)


def test_what_has_no_match_is_an_error_inside(rng):
    table = table_of(initial_rows(rng))
    with sok.OptimizerScope([table]), pytest.raises(ValueError, match="`use_ema` is True"):
        keras.optimizers.SGD(0.1, use_ema=True).apply_gradients([(gradient(table, [1], ONES), table)])


def test_an_error_inside_leaves_nothing_behind():
    with pytest.raises(KeyError), sok.OptimizerScope([]), sok.OptimizerScope([]):
        raise KeyError("from the body")
    assert optimizer_scope._patch._users == 0
    assert optimizer_scope._scopes.value is None


def test_nested_scopes_work_until_the_outermost_ends(rng):
    weights = initial_rows(rng)
    table, stock = table_of(weights), keras.optimizers.SGD(0.5)
    with sok.OptimizerScope([table]):
        with sok.OptimizerScope([table]):
            pass
        stock.apply_gradients([(gradient(table, [1], ONES), table)])
    assert_close(rows_of(table)[1], weights[1] - 0.5)
    # Without a scope the stock optimizer does not know what a table is.
    with pytest.raises((TypeError, ValueError, AttributeError, tf.errors.OpError)):
        keras.optimizers.SGD(0.5).apply_gradients([(gradient(table, [1], ONES), table)])
    assert_close(rows_of(table)[1], weights[1] - 0.5)


def test_other_threads_are_not_inside(rng):
    table = table_of(initial_rows(rng))
    grad, failures = gradient(table, [1], ONES), []

    def elsewhere():
        try:
            keras.optimizers.SGD(0.5).apply_gradients([(grad, table)])
        except Exception as error:
            failures.append(error)

    before = rows_of(table)
    with sok.OptimizerScope([table]):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(failures) == 1
    np.testing.assert_array_equal(rows_of(table), before)


def test_a_users_subclass_is_refused_where_it_calls_its_base(rng):
    class Halving(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients(grads_and_vars)

    table = table_of(initial_rows(rng))
    with sok.OptimizerScope([table]), pytest.raises(ValueError, match=saying("Halving", "known are exactly")):
        Halving(0.5).apply_gradients([(gradient(table, [1], ONES), table)])


@pytest.mark.parametrize("variables", [None, "table", {1, 2}, iter([])], ids=["None", "str", "set", "iterator"])
def test_only_lists_and_tuples_are_accepted(variables):
    with pytest.raises(RuntimeError, match=saying("`trainable_variables`", "list or tuple")):
        sok.OptimizerScope(variables)


def test_a_distributed_optimizer_inside_does_its_own_routing(rng):
    weights = initial_rows(rng)
    table, dense = table_of(weights), keras.Variable([1.0])
    optimizer = sok.DistributedOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.9), embedding_optimizer=sok.optimizers.SGD(0.25)
    )
    with sok.OptimizerScope([table, dense]):
        optimizer.apply_gradients([(gradient(table, [1], ONES), table), (tf.ones([1]), dense)])
    assert_close(rows_of(table)[1], weights[1] - 0.25)
    assert float(dense.numpy()[0]) == 0.5
