"""`sok.OptimizerWrapper` against the stock optimizers that it wraps. Its slots: test_v2_optimizer_slots.py; several
workers: tests/multiprocess/test_v2.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.sok.wrapper_cases import (
    BATCHES,
    DIM,
    MATCHED,
    MATRIX,
    ROWS,
    STEPS,
    STOCK,
    gradients_of,
    stock_rows,
    tables_of,
    train_on,
    upstream,
)

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy


def test_the_judge_sees_rows_that_drift():
    # Stock Adam on the dense table moves rows outside the batch; had the judge let it, these would be equal.
    stock, twin = STOCK["keras.Adam"](), keras.Variable(MATRIX)
    for step in range(STEPS):
        gradient = np.zeros([ROWS, DIM], np.float32)
        np.add.at(gradient, BATCHES[step], upstream(step))
        stock.apply_gradients([(tf.constant(gradient), twin)])
    assert np.abs(twin.numpy() - stock_rows(STOCK["keras.Adam"]())[-1]).max() > 0.01


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_those_of_the_stock_optimizer(name, compiled):
    tables, optimizer = tables_of(MATRIX), sok.OptimizerWrapper(STOCK[name]())

    def train(ids, upstream):
        optimizer.apply_gradients(zip(gradients_of(tables, ids, upstream), tables, strict=True))

    if compiled:
        signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)]
        train = tf.function(train, input_signature=signature)
    for step, expected in enumerate(stock_rows(STOCK[name]())):
        train(tf.constant(BATCHES[step]), tf.constant(upstream(step)))
        for table in tables:
            np.testing.assert_allclose(sok.export(table)[1], expected, rtol=2e-5, atol=1e-6, err_msg=f"step {step}")
    assert int(optimizer.iterations) == STEPS


@pytest.mark.parametrize("name", [name for name in STOCK if name.startswith(("v1.", "legacy."))])
def test_in_a_session_rows_are_those_of_the_stock_optimizer(name):
    expected = stock_rows(STOCK[name]())
    with tf.Graph().as_default():
        tables, weight = (
            tables_of(MATRIX)[:1],
            tf.compat.v1.get_variable("weight", initializer=[2.0], use_resource=True),
        )
        ids, factor = tf.compat.v1.placeholder(tf.int64, [None]), tf.compat.v1.placeholder(tf.float32, [None, DIM])
        loss = tf.reduce_sum(sok.all2all_dense_embedding(tables[0], ids) * factor)
        optimizer = sok.OptimizerWrapper(STOCK[name]())
        variables = [weight, *tables]
        gradients = tf.gradients(loss + tf.reduce_sum(weight), variables)
        train = optimizer.apply_gradients(zip(gradients, variables, strict=True))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for step in range(STEPS):
                session.run(train, {ids: BATCHES[step], factor: upstream(step)})
                np.testing.assert_allclose(tables[0].eval(), expected[step], rtol=2e-5, atol=1e-6)
            assert session.run(weight)[0] < 2.0


@pytest.mark.parametrize("make", [v1.GradientDescentOptimizer, lambda rate: v1.MomentumOptimizer(rate, 0.5)])
def test_in_a_session_a_learning_rate_that_is_a_variable_is_followed(make):
    with tf.Graph().as_default():
        rate = tf.compat.v1.get_variable("rate", initializer=0.5, trainable=False, use_resource=True)
        table = sok.Variable(MATRIX)
        (gradient,) = tf.gradients(tf.reduce_sum(sok.all2all_dense_embedding(table, [1])), [table])
        train = sok.OptimizerWrapper(make(rate)).apply_gradients([(gradient, table)])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(rate.assign(0.25))
            session.run(train)
            np.testing.assert_allclose(table.eval()[1], MATRIX[1] - 0.25, rtol=1e-5)


def test_v1_minimize_trains_tables_and_others_and_counts():
    with tf.Graph().as_default():
        table = sok.Variable(MATRIX)
        weight = tf.compat.v1.get_variable("weight", initializer=[2.0], use_resource=True)
        step = tf.compat.v1.train.get_or_create_global_step()
        optimizer = sok.OptimizerWrapper(v1.GradientDescentOptimizer(0.5))
        loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1, 1])) * weight[0]
        train = optimizer.minimize(loss, step)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train)
            assert session.run(step) == 1
            np.testing.assert_allclose(table.eval()[1], MATRIX[1] - 2 * 0.5 * 2.0, rtol=1e-5)
            np.testing.assert_allclose(session.run(weight), [2.0 - 0.5 * 2 * MATRIX[1].sum()], rtol=1e-5)


@pytest.mark.parametrize("name", ["keras.SGD", "tf_keras.Adam", "legacy.Adagrad", "v1.Adam"])
def test_other_variables_in_the_call_are_the_stock_optimizers(name):
    optimizer, stock, table = sok.OptimizerWrapper(STOCK[name]()), STOCK[name](), sok.Variable(MATRIX)
    make = keras.Variable if name.startswith("keras.") else tf.Variable
    weight, twin = make([1.0, -2.0]), make([1.0, -2.0])
    for factor in (1.0, -3.0, 0.5):
        gradient = tf.constant([factor, 2.0])
        (of_table,) = gradients_of([table], tf.constant([3]), tf.ones([1, DIM]))
        optimizer.apply_gradients([(gradient, weight), (None, sok.Variable(MATRIX)), (of_table, table)])
        stock.apply_gradients([(gradient, twin)])
        np.testing.assert_array_equal(weight.numpy(), twin.numpy())
    changed = np.flatnonzero((table.numpy() != MATRIX).any(axis=1))
    assert changed.tolist() == [3]


@pytest.mark.parametrize("name", ["keras.SGD", "tf_keras.SGD", "legacy.SGD"])
def test_a_learning_rate_set_later_acts_inside_a_compiled_function(name):
    optimizer, table = sok.OptimizerWrapper(MATCHED[name]()), sok.Variable(MATRIX)
    if name == "legacy.SGD":
        optimizer = sok.OptimizerWrapper(legacy.SGD(0.1))

    @tf.function
    def train():
        optimizer.apply_gradients(zip(gradients_of([table], tf.constant([2]), tf.ones([1, DIM])), [table], strict=True))

    train()
    np.testing.assert_allclose(table.numpy()[2], MATRIX[2] - 0.1, rtol=1e-5)
    optimizer.learning_rate = 0.5
    assert float(optimizer.lr) == float(optimizer.optimizer.learning_rate) == 0.5
    train()
    np.testing.assert_allclose(table.numpy()[2], MATRIX[2] - 0.6, rtol=1e-5)


def test_it_composes_with_the_distributed_tape():
    table, weight = sok.Variable(MATRIX), tf.Variable([2.0])
    optimizer = sok.OptimizerWrapper(tf_keras.optimizers.SGD(0.5))
    with sok.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1])) * weight[0]
    variables = [table, weight]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    np.testing.assert_allclose(table.numpy()[1], MATRIX[1] - 1.0, rtol=1e-6)
    np.testing.assert_allclose(weight, [2.0 - 0.5 * MATRIX[1].sum()], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: "adam", TypeError, "`optimizer` .*Keras 3.*'adam'"),
        (lambda: sok.optimizers.SGD(0.1), TypeError, "train tables without a wrapper"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), ValueError, "it scales losses"),
        (
            lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD()),
            ValueError,
            "it scales losses",
        ),
        (lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0), ValueError, "it scales losses"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        sok.OptimizerWrapper(make())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: keras.optimizers.Adafactor(0.1), "exactly keras.optimizers.SGD, "),
        (lambda: keras.optimizers.RMSprop(0.1, use_ema=True), "`use_ema` is True"),
        (lambda: keras.optimizers.RMSprop(0.1, weight_decay=0.1), "`weight_decay` is 0.1"),
        (lambda: legacy.SGD(0.1, momentum=0.5, global_clipnorm=1.0), "`global_clipnorm` is 1.0"),
        (lambda: v1.AdagradDAOptimizer(0.1, tf.Variable(0)), "known are exactly.*FtrlOptimizer"),
    ],
)
def test_a_rule_that_tables_cannot_have_is_refused_at_the_first_step(make, reason):
    table = sok.Variable(MATRIX)
    pairs = list(zip(gradients_of([table], tf.constant([1]), tf.ones([1, DIM])), [table], strict=True))
    with pytest.raises(ValueError, match=rf"cannot do to tables what .* does: .*{reason}"):
        sok.OptimizerWrapper(make()).apply_gradients(pairs)
    np.testing.assert_array_equal(table.numpy(), MATRIX)


@pytest.mark.parametrize("rate", [np.nan, np.inf, -0.5])
@pytest.mark.parametrize("kind", ["variable", "schedule", "function", "stock"])
def test_a_rate_that_makes_no_sense_changes_nothing(kind, rate):
    variable, stock = tf.Variable(rate), keras.optimizers.Lion(0.1)
    stock.learning_rate = rate
    given = {"variable": variable, "schedule": lambda step: variable * 1.0, "function": lambda: variable}
    optimizer = sok.OptimizerWrapper(stock) if kind == "stock" else sok.optimizers.SGD(given[kind])
    table = sok.Variable(MATRIX)
    train = tf.function(lambda: train_on(table, optimizer, [0]))
    for step in (lambda: train_on(table, optimizer, [0]), train):
        with pytest.raises(tf.errors.InvalidArgumentError, match="learning rate .*finite"):
            step()
    np.testing.assert_array_equal(table.numpy(), MATRIX)
    assert int(optimizer.iterations) == 0


def test_a_rule_of_the_batch_alone_follows_a_rate_set_later_and_trains_tables_of_their_own_width():
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1, momentum=0.5))
    narrow, wide = sok.Variable([[1.0]]), sok.DynamicVariable(40, initializer="1")

    @tf.function
    def train():
        with tf.GradientTape() as tape:
            pooled = sok.lookup_sparse([narrow, wide], [tf.ragged.constant([[0]])] * 2, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(p) for p in pooled])
        optimizer.apply_gradients(zip(tape.gradient(loss, [narrow, wide]), [narrow, wide], strict=True))

    train()
    optimizer.learning_rate = 1.0
    train()
    # Velocities: -0.1, then -0.05 - 1.
    for table in (narrow, wide):
        np.testing.assert_allclose(sok.export(table)[1], 1.0 - 0.1 - 1.05, rtol=1e-5, atol=1e-6)


def test_rows_of_lookups_that_made_none_are_left_out():
    table = sok.DynamicVariable(2, initializer="1")
    with tf.GradientTape() as tape:
        unseen = sok.group_embedding_lookup_sparse([table], [tf.constant([[5]])], training=False)[0]
        seen = sok.all2all_dense_embedding(table, [7])
        loss = tf.reduce_sum(unseen) + tf.reduce_sum(seen)
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.5, momentum=0.9))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    indices, rows = sok.export(table)
    assert (indices.numpy().tolist(), rows.numpy().tolist()) == ([7], [[0.5, 0.5]])


@pytest.mark.parametrize("pairs", [[], [None]])
def test_a_step_without_any_gradient_is_refused(pairs):
    table = sok.DynamicVariable(2)
    with pytest.raises(ValueError, match="No gradients"):
        sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)).apply_gradients([(p, table) for p in pairs])


def test_misuse_is_explained():
    table = sok.Variable(MATRIX, name="misused")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    (gradient,) = gradients_of([table], tf.constant([1]), tf.ones([1, DIM]))
    with pytest.raises(ValueError, match="once: table 'misused.* twice"):
        optimizer.apply_gradients([(gradient, table), (gradient, table)])
    with pytest.raises(TypeError, match="gradient of .*'misused.*tf.IndexedSlices"):
        optimizer.apply_gradients([(tf.ones([ROWS, DIM]), table)])
    for method in (optimizer.minimize, optimizer.compute_gradients):
        with pytest.raises(TypeError, match="tf.compat.v1.train .*SGD of keras"):
            method(lambda: 0.0)
    with pytest.raises(AttributeError, match="cannot be set"):
        sok.OptimizerWrapper(v1.GradientDescentOptimizer(0.1)).learning_rate = 1.0
