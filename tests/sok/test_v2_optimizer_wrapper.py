"""`sok.OptimizerWrapper` against the stock optimizers that it wraps, on the equivalent dense table.

The judge is the stock optimizer itself, after each of whose steps the rows outside the batch (of weights and slots) are
put back: SOK v2 leaves those alone. Several workers: test_v2_multiprocess.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy

ROWS, DIM, STEPS = 8, 3, 5
MATRIX = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
BATCHES = [np.array(ids) for ids in ([1, 4, 1], [4, 7, 0, 0], [2], [1, 7, 2, 4, 1], [0, 1])]

MATCHED = {
    "keras.SGD": lambda: keras.optimizers.SGD(0.1),
    "keras.Adagrad": lambda: keras.optimizers.Adagrad(0.1, 0.2, epsilon=1e-3),
    "keras.Adam": lambda: keras.optimizers.Adam(0.1, 0.8, 0.99, 1e-4),
    "keras.Adam schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "tf_keras.SGD": lambda: tf_keras.optimizers.SGD(0.1),
    "tf_keras.Adagrad": lambda: tf_keras.optimizers.Adagrad(0.1, 0.2),
    "tf_keras.Adam": lambda: tf_keras.optimizers.Adam(0.1, 0.8, 0.99, 1e-4),
    "legacy.SGD": lambda: legacy.SGD(0.1, decay=0.3),
    "legacy.Adagrad": lambda: legacy.Adagrad(0.1),
    "legacy.Adam": lambda: legacy.Adam(0.1, 0.8, 0.99, 1e-4),
    "legacy.Adam schedule": lambda: legacy.Adam(tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "v1.GradientDescent": lambda: v1.GradientDescentOptimizer(0.1),
    "v1.Adagrad": lambda: v1.AdagradOptimizer(0.1, 0.2),
    "v1.Adam": lambda: v1.AdamOptimizer(0.1, 0.8, 0.99, 1e-4),
}
STOCK = {**MATCHED}


def upstream(step):
    return np.random.default_rng(10 + step).normal(size=(len(BATCHES[step]), DIM)).astype(np.float32)


def tables_of(matrix):
    dynamic = sok.DynamicVariable(DIM)
    sok.assign(dynamic, np.arange(ROWS), matrix)
    return [sok.Variable(matrix), dynamic]


def variables_of(stock):
    return stock.variables() if callable(stock.variables) else stock.variables


def stock_rows(stock, steps=STEPS):
    """The dense table after each step of the stock optimizer on the rows of the batch."""
    twin = keras.Variable(MATRIX) if isinstance(stock, keras.optimizers.Optimizer) else tf.Variable(MATRIX)
    found = []
    for step in range(steps):
        gradient = np.zeros([ROWS, DIM], np.float32)
        np.add.at(gradient, BATCHES[step], upstream(step))
        before = {id(v): v.numpy().copy() for v in [twin, *variables_of(stock)] if tuple(v.shape) == (ROWS, DIM)}
        stock.apply_gradients([(tf.constant(gradient), twin)])
        left = np.setdiff1d(np.arange(ROWS), BATCHES[step])
        for variable in [twin, *variables_of(stock)]:
            if id(variable) in before:
                after = variable.numpy().copy()
                after[left] = before[id(variable)][left]
                variable.assign(after)
            elif tuple(variable.shape) == (ROWS, DIM):  # a slot, made in this step
                after = variable.numpy().copy()
                after[left] = untouched_slot(stock, variable)[left]
                variable.assign(after)
        found.append(twin.numpy().copy())
    return found


def untouched_slot(stock, slot):
    """What a slot held before the first step: the same number everywhere, as another optimizer's new slot says."""
    value = getattr(stock, "initial_accumulator_value", getattr(stock, "_initial_accumulator_value", None))
    if value is None:
        value = 1.0 if isinstance(stock, v1.RMSPropOptimizer) and "RMSProp_1" not in slot.name else 0.0
    return np.full([ROWS, DIM], value, np.float32)


def gradients_of(tables, ids, upstream):
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(sok.all2all_dense_embedding(t, ids) * upstream) for t in tables])
    return tape.gradient(loss, tables)


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
        (lambda: "adam", TypeError, "`optimizer` must be an optimizer of Keras 3.*Received: 'adam'"),
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


def test_misuse_is_explained():
    table = sok.Variable(MATRIX, name="misused")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    (gradient,) = gradients_of([table], tf.constant([1]), tf.ones([1, DIM]))
    with pytest.raises(ValueError, match="name each variable once: table 'misused.* is there twice"):
        optimizer.apply_gradients([(gradient, table), (gradient, table)])
    with pytest.raises(TypeError, match="The gradient of embedding table 'misused.*tf.IndexedSlices"):
        optimizer.apply_gradients([(tf.ones([ROWS, DIM]), table)])
    for method in (optimizer.minimize, optimizer.compute_gradients):
        with pytest.raises(TypeError, match="is for tf.compat.v1.train optimizers. With SGD of keras"):
            method(lambda: 0.0)
    with pytest.raises(AttributeError, match="cannot be set"):
        sok.OptimizerWrapper(v1.GradientDescentOptimizer(0.1)).learning_rate = 1.0
