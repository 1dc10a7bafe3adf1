"""A table that a training step looks up and nobody trains is told of, once; one that is to stay as it is, is not."""

import os
import subprocess
import sys
import warnings

import keras
import pytest
import tensorflow as tf

import sok
from sok.table import reading
from tests.messages import saying

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


def without_the_table_in_a_function(table, weight):
    """An eager tape around a function."""
    forward = tf.function(look_up)

    def step():
        with tf.GradientTape() as tape:
            loss = forward(table) * weight
        weight.assign_sub(tape.gradient(loss, weight))

    return step


def gradients_that_nobody_applies(table, weight):
    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = look_up(table) * weight
        return tape.gradient(loss, [weight, table])

    return lambda: weight.assign_sub(gradients()[0])


@pytest.mark.parametrize("steps_of", [without_the_table_in_a_function, gradients_that_nobody_applies])
@pytest.mark.parametrize("keep", ["save", "export"])
def test_what_python_cannot_see_is_told_of_where_rows_are_kept(steps_of, keep, tmp_path):
    layer, weight = sok.All2AllDenseEmbedding(100, 4, 1, 1), tf.Variable(1.0)
    layer.build([None, 1])
    table = layer.embedding_variable
    step = steps_of(table, weight)
    for _ in range(3):
        step()

    def kept(to):
        if keep == "save":
            sok.save(tmp_path / to, [table])
        else:
            model = keras.Sequential([keras.Input([1], dtype="int64"), layer])
            sok.export_saved_model(model, tmp_path / to)

    with pytest.warns(
        UserWarning, match=saying(f"'{table.table_name}'", "no optimizer has trained it", "tape.gradient")
    ):
        kept("first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept("second")


@pytest.mark.parametrize("is_right", [False, True])
def test_a_graph_of_tf_1_whose_optimizers_leave_a_table_is_told_of_where_it_is_complete(is_right):
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        table, weight = sok.EmbeddingVariable(4, 100, name=f"of_tf_1_{is_right}"), v1.get_variable("w", initializer=1.0)
        loss = look_up(table) * weight
        step = [v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[weight])]
        if is_right:
            step.append(sok.optimizers.SGD(0.1).apply_gradients(zip(tf.gradients(loss, [table]), [table], strict=True)))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            hook = sok.hooks.BroadcastVariablesHook()
            hook.begin()
            hook.begin()
    texts = [str(w.message) for w in told if table.table_name in str(w.message)]
    assert len(texts) == (0 if is_right else 1), texts


AT_EXIT = """
import sys, tensorflow as tf, sok
def main():
    table, weight = sok.EmbeddingVariable(2, 10, name="left_out"), tf.Variable(1.0)
    forward = tf.function(lambda: tf.reduce_sum(sok.group_embedding_lookup([table], [tf.constant([1])])[0]))
    with tf.GradientTape() as tape:
        loss = forward() * weight
    weight.assign_sub(tape.gradient(loss, weight))
    if len(sys.argv) > 1:
        raise ValueError
main()
"""


@pytest.mark.parametrize("how, is_told", [([], True), (["fail"], False)])
def test_the_end_of_a_program_tells_of_it_unless_it_failed(how, is_told):
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", AT_EXIT, *how]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (answer.returncode == 0) == is_told
    assert ("'left_out' is looked up for training" in answer.stderr) == is_told, answer.stderr


def test_a_function_is_not_looked_through_for_each_table_that_it_trains(monkeypatch):
    tables, looked_through = [sok.EmbeddingVariable(4, 100) for _ in range(3)], []
    monkeypatch.setattr(reading, "_has_update", lambda graph: looked_through.append(graph) or True)
    optimizer = sok.optimizers.SGD(0.1)

    @tf.function
    def step(trained):
        with tf.GradientTape() as tape:
            loss = tf.add_n([look_up(table) for table in tables])
        pairs = list(zip(tape.gradient(loss, tables), tables, strict=True))
        optimizer.apply_gradients(pairs[:trained])

    step(3)
    assert not looked_through
    tables = [sok.EmbeddingVariable(4, 100) for _ in range(3)]
    with pytest.warns(UserWarning, match="leaves it as it is"):
        step(2)
    assert len(looked_through) == 1
