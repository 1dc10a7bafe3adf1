"""Tables that a training step looks up and nobody trains."""

import warnings

import pytest
import tensorflow as tf

import sok
from tests.messages import saying

RUNS = pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "function"])


def table(name, **options):
    return sok.EmbeddingVariable(2, 10, name=name, initializer="ones", **options)


def loss_of(*tables):
    return tf.add_n([tf.reduce_sum(one.sparse_read(tf.constant([1], tf.int64))) for one in tables])


@RUNS
def test_a_table_that_no_optimizer_is_given_is_named_once(run):
    trained, forgotten = table("trained"), table("forgotten")
    optimizer = sok.optimizers.SGD(0.1)

    @run
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(trained, forgotten)
        optimizer.apply_gradients([(tape.gradient(loss, trained), trained)])

    with pytest.warns(UserWarning, match=saying("'forgotten", "no optimizer", "trainable=False")) as told:
        step()
    assert not [w for w in told if "trained'" in str(w.message)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


@RUNS
def test_no_table_is_named_that_is_trained_frozen_or_read_without_a_tape(run):
    first, second, frozen, read = table("first"), table("second"), table("frozen", trainable=False), table("read")
    one, other = sok.optimizers.SGD(0.1), sok.optimizers.SGD(0.1)
    one.build([first])
    other.build([second])

    @run
    def step():
        loss_of(read)
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(first, second, frozen)
        one.apply_gradients([(tape.gradient(loss, first), first)])
        other.apply_gradients([(tape.gradient(loss, second), second)])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        step()


def test_a_lookup_inside_a_function_of_a_step_counts():
    trained, forgotten = table("trained_inside"), table("forgotten_inside")
    optimizer = sok.optimizers.SGD(0.1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.function(lambda: loss_of(trained, forgotten))()
        optimizer.apply_gradients([(tape.gradient(loss, trained), trained)])

    with pytest.warns(UserWarning, match="forgotten_inside"):
        step()
