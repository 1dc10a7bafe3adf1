"""Names, settings, checkpoints and misuse of optimizers."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.lookup.lookup import lookup_rows
from tests.sok.optimizer_cases import DIM, gradient, initial_rows, table_of

ALL = (
    sok.optimizers.SGD,
    sok.optimizers.Adagrad,
    sok.optimizers.Adam,
    sok.optimizers.LazyAdam,
    sok.optimizers.LazyAdamOptimizer,
    sok.SGD,
    sok.tf.keras.optimizers.LazyAdamOptimizer,
)
ONES = np.ones((1, DIM), np.float32)


# Names.


def test_slot_sets_are_numbered_in_the_order_of_making():
    names = [sok.optimizers.Adam(name="numbered").slot_set for _ in range(3)]
    assert names == ["numbered", "numbered_1", "numbered_2"]


def test_a_name_that_looks_numbered_is_not_given_twice():
    names = [sok.optimizers.SGD(name=name).slot_set for name in ("odd", "odd_1", "odd", "odd")]
    assert len(set(names)) == 4


def test_each_v1_graph_counts_anew():
    found = []
    for _ in range(2):
        with tf.Graph().as_default():
            found.append([sok.optimizers.Adam().slot_set, sok.optimizers.Adam().slot_set])
    assert found == [["Adam", "Adam_1"]] * 2


@pytest.mark.parametrize("name", ["", "_hidden", "two words", 3])
def test_a_name_that_is_no_name_scope_is_an_error(name):
    with pytest.raises(ValueError, match="`name` .*string of letters"):
        sok.optimizers.SGD(name=name)


def test_two_optimizers_of_one_rule_train_two_tables(rng):
    weights = initial_rows(rng)
    tables = [table_of(weights, "first"), table_of(weights, "second")]
    for table, optimizer in zip(tables, [sok.optimizers.Adam(0.1), sok.optimizers.Adam(0.1)], strict=True):
        optimizer.apply_gradients([(gradient(table, [1], ONES), table)])
    np.testing.assert_array_equal(tables[0].sparse_read([1]), tables[1].sparse_read([1]))


def test_an_optimizer_keeps_no_table_alive(rng):
    table = table_of(initial_rows(rng), "mortal")
    optimizer = sok.optimizers.Adam(0.1)
    optimizer.apply_gradients([(gradient(table, [1], ONES), table)])
    alive = weakref.ref(table)
    del table
    gc.collect()
    assert alive() is None
    assert int(optimizer.iterations) == 1


# Settings.


@pytest.mark.parametrize("cls", ALL)
def test_config_makes_the_same_optimizer_again(cls):
    optimizer = cls(0.25) if issubclass(cls, sok.optimizers.SGD) else cls(0.25, epsilon=1e-3)
    config = optimizer.get_config()
    again = cls.from_config(config)
    assert type(again) is cls
    assert again.get_config() == config
    assert again._rule_config() == optimizer._rule_config()
    assert again.slot_set != optimizer.slot_set


def test_config_holds_clipping_and_policy():
    config = sok.optimizers.SGD(clipnorm=2.0, nonfinite_gradients="skip", name="configured").get_config()
    assert config == {
        "name": "configured",
        "learning_rate": pytest.approx(0.01),
        "clipnorm": 2.0,
        "clipvalue": None,
        "global_clipnorm": None,
        "nonfinite_gradients": "skip",
    }


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_config_holds_schedules_of_both_keras(library):
    schedule = library.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    again = sok.optimizers.Adam.from_config(sok.optimizers.Adam(schedule).get_config())
    assert isinstance(again._rate.schedule, library.optimizers.schedules.ExponentialDecay)
    assert again._rate.schedule.get_config() == schedule.get_config()
    assert float(again.learning_rate) == 0.5


@pytest.mark.parametrize("rate", [lambda step: 0.1, lambda: 0.1], ids=["step", "nothing"])
def test_config_of_a_function_is_an_error(rate):
    with pytest.raises(TypeError, match="get_config.. .*learning rate"):
        sok.optimizers.SGD(rate).get_config()


def test_config_in_a_v1_graph_holds_numbers_only():
    with tf.Graph().as_default():
        assert sok.optimizers.SGD(0.25).get_config()["learning_rate"] == 0.25
        variable = tf.compat.v1.get_variable("rate", initializer=0.5)
        with pytest.raises(TypeError, match="the variable 'rate:0'"):
            sok.optimizers.SGD(variable).get_config()


def test_repr_says_what_it_does():
    optimizer = sok.optimizers.Adam(0.5, clipnorm=2.0, nonfinite_gradients="skip", name="shown")
    assert repr(optimizer) == (
        "<sok.optimizers.Adam 'shown': learning_rate=0.5, beta_1=0.9, beta_2=0.999, epsilon=1e-07, clipnorm=2.0, "
        "nonfinite_gradients='skip'>"
    )
    assert "learning_rate=the schedule function" in repr(sok.optimizers.SGD(lambda step: 0.1))
    with tf.Graph().as_default():
        assert "the tensor 'rate:0'" in repr(sok.optimizers.SGD(tf.compat.v1.placeholder(tf.float32, [], name="rate")))


def test_variables_are_the_counter_and_the_rate():
    optimizer = sok.optimizers.Adam(0.5)
    assert optimizer.variables == [optimizer.iterations, optimizer.learning_rate]
    assert sok.optimizers.Adam(lambda step: 0.5).variables[0].dtype == tf.int64


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sok.optimizers.Adam(beta_1=1.0), r"`beta_1` .*\[0, 1\).*: 1.0"),
        (lambda: sok.optimizers.LazyAdam(beta_2=-0.1), "`beta_2` must be"),
        (lambda: sok.optimizers.LazyAdamOptimizer(beta1="0.9"), "`beta_1` must be"),
        (lambda: sok.optimizers.Adam(epsilon=-1.0), "`epsilon` .*finite"),
        (lambda: sok.optimizers.Adagrad(initial_accumulator_value=-0.1), "`initial_accumulator_value` must be"),
        (lambda: sok.optimizers.Adagrad(initial_accumulator_value=0.0, epsilon=0.0), "divide 0 by 0"),
    ],
)
def test_hyperparameters_out_of_range_are_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# Checkpoints.


def test_a_checkpoint_brings_back_step_and_rate(tmp_path, rng):
    table, optimizer = table_of(initial_rows(rng)), sok.optimizers.Adam(0.5)
    optimizer.learning_rate = 0.125
    for _ in range(3):
        optimizer.apply_gradients([(gradient(table, [1], ONES), table)])
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    again = sok.optimizers.Adam(0.5)
    tf.train.Checkpoint(optimizer=again).restore(path).assert_consumed()
    assert int(again.iterations) == 3
    assert float(again.learning_rate) == 0.125


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_checkpoint_holds_a_keras_variable_as_rate(library, tmp_path):
    make = library.Variable if library is keras else tf.Variable
    optimizer, again = sok.optimizers.SGD(make(0.5)), sok.optimizers.SGD(make(0.1))
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(optimizer=again).restore(path).assert_consumed()
    assert float(again.learning_rate.numpy()) == 0.5


def test_a_v1_saver_holds_the_step(tmp_path):
    path = str(tmp_path / "saved")
    for expected in (1, 2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = sok.EmbeddingVariable(1, 4, initializer="ones", name="saved")
            loss = tf.reduce_sum(lookup_rows(table, tf.constant([2], tf.int64)))
            optimizer = sok.optimizers.Adam(0.1)
            update = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)])
            saver = tf.compat.v1.train.Saver()
            if expected == 1:
                session.run(tf.compat.v1.global_variables_initializer())
            else:
                saver.restore(session, path)
            session.run(update)
            assert session.run(optimizer.iterations) == expected
            saver.save(session, path)


# Misuse.


@pytest.mark.parametrize("make", [lambda: tf.Variable([1.0]), lambda: keras.Variable([1.0])], ids=["tf", "keras"])
def test_other_variables_are_an_error_that_says_where_they_go(make):
    with pytest.raises(TypeError, match="split_embedding_variable_from_others.*sok.DistributedOptimizer"):
        sok.optimizers.SGD().apply_gradients([(tf.ones([1]), make())])


def test_build_checks_variables(rng):
    optimizer = sok.optimizers.SGD()
    optimizer.build([table_of(initial_rows(rng))])
    with pytest.raises(TypeError, match="embedding variables only"):
        optimizer.build([tf.Variable(1.0)])


def test_a_dense_gradient_is_an_error(rng):
    table = table_of(initial_rows(rng), "sparse_only")
    with pytest.raises(TypeError, match="gradient of embedding table 'sparse_only.*must be tf.IndexedSlices"):
        sok.optimizers.SGD().apply_gradients([(tf.ones([1, DIM]), table)])


def test_the_same_variable_twice_is_an_error(rng):
    table = table_of(initial_rows(rng), "twice")
    grad = gradient(table, [1], ONES)
    with pytest.raises(ValueError, match="table 'twice.*' is there twice"):
        sok.optimizers.SGD().apply_gradients([(grad, table), (grad, table)])


def test_what_is_no_pair_is_an_error(rng):
    with pytest.raises(ValueError, match="must hold pairs"):
        sok.optimizers.SGD().apply_gradients([(None, table_of(initial_rows(rng)), 1)])


def test_use_in_another_graph_is_an_error(rng):
    eager = sok.optimizers.SGD()
    with tf.Graph().as_default():
        table = sok.EmbeddingVariable(1, 4, name="elsewhere")
        grad = tf.gradients(tf.reduce_sum(lookup_rows(table, tf.constant([1], tf.int64))), table)[0]
        with pytest.raises(RuntimeError, match="eager mode .*v1 graph"):
            eager.apply_gradients([(grad, table)])
        in_graph = sok.optimizers.SGD()
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="v1 graph .*another one"):
        in_graph.apply_gradients([(None, table)] * 0)
    with pytest.raises(RuntimeError, match="v1 graph .*eager mode"):
        in_graph.apply_gradients([])


def test_a_function_inside_a_v1_graph_uses_an_optimizer_of_that_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(1, 4, initializer="ones", name="in_function")
        optimizer = sok.optimizers.SGD(0.5)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup_rows(table, tf.constant([2], tf.int64)))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return loss

        loss = step()
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(loss)
        assert session.run(table.sparse_read([2]))[0, 0] == 0.5
