"""Tape, broadcast, callbacks and hooks of one worker, and what they refuse. Several workers: tests/multiprocess."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.distributed import replicas
from sok.distributed.reduction import check_op
from sok.lookup.lookup import lookup_rows
from tests.messages import saying

v1 = tf.compat.v1


@pytest.mark.parametrize("op", ["mean", None, 0, "adasum"])
def test_an_unknown_op_is_refused(op):
    for refuse in (check_op, lambda op: sok.DistributedGradientTape(tf.GradientTape(), op=op)):
        with pytest.raises(ValueError, match=saying("`op`", "sok.Average", "or sok.Sum")):
            refuse(op)


def test_the_tape_gives_what_the_bare_tape_gives_on_one_worker(call):
    table = sok.EmbeddingVariable(2, 10, name="taped", initializer="ones")
    weight, unused = tf.Variable([2.0, 3.0]), tf.Variable(1.0)

    def step(keys):
        with sok.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            loss = tf.reduce_sum(lookup_rows(table, keys) * weight)
        # Single, nested and repeated sources, as a bare tape takes them.
        grads = tape.gradient(loss, {"t": table, "rest": (weight, unused)})
        return grads["t"].values, grads["rest"][0], tape.gradient(loss, weight), grads["rest"][1] is None

    values, of_weight, again, is_none = call(step, tf.constant([1, 2], tf.int64))
    np.testing.assert_array_equal(values, [[2.0, 3.0]] * 2)
    np.testing.assert_array_equal(of_weight, [2.0, 2.0])
    np.testing.assert_array_equal(again, [2.0, 2.0])
    assert is_none


def test_the_tape_wraps_one_that_has_recorded_and_passes_the_rest_on():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    assert sok.DistributedGradientTape(tape).gradient(y, x, output_gradients=tf.constant(2.0)) == 12.0
    with sok.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
        tape.watch(x)
        with tape.stop_recording():
            y = x * x
    assert tape.gradient(y, [x]) == [None]


def test_what_the_tape_cannot_reduce_is_refused():
    with pytest.raises(TypeError, match=saying("`tape`", "tf.GradientTape", "Received: None")):
        sok.DistributedGradientTape(None)
    weight = tf.Variable(1.0)
    with sok.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = weight * 2.0
    with pytest.raises(TypeError, match=saying("must be variables", "not their handles")):
        tape.gradient(loss, weight.handle)
    for method in (tape.jacobian, tape.batch_jacobian):
        with pytest.raises(NotImplementedError, match=saying("gradient()", "nothing else")):
            method(loss, weight)
    with pytest.raises(AttributeError):
        _ = tape.no_such_method


def test_broadcast_on_one_worker_changes_nothing():
    weight = tf.Variable([1.0])
    table = sok.EmbeddingVariable(2, 10, name="alone")
    assert sok.broadcast_variables([weight, table]) is None
    assert weight.numpy() == [1.0]
    with tf.Graph().as_default(), v1.Session() as session:
        assert session.run(sok.broadcast_variables(v1.global_variables())) is None
    for root_rank in (1, -1, True):
        with pytest.raises(ValueError, match=rf"`root_rank` must be in \[0, 1\).*Received: {root_rank}"):
            sok.broadcast_variables([weight], root_rank)


def test_broadcast_says_which_variable_it_cannot_send():
    with pytest.raises(ValueError, match=saying("'shapeless", "shape is not known")):
        sok.broadcast_variables([tf.Variable([1.0], shape=tf.TensorShape(None), name="shapeless")])
    with pytest.raises(TypeError, match="'words.*dtype is string"):
        sok.broadcast_variables([tf.Variable(["a"], name="words")])


def test_callbacks_refuse_bad_arguments_and_v1_graphs():
    for argument in ("num_samples", "num_validation_samples"):
        with pytest.raises(ValueError, match=rf"`{argument}` must be a number of samples.*Received: -1"):
            sok.callbacks.MetricAverageCallback(**{argument: -1})
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="sok.callbacks need eager execution"):
        sok.callbacks.BroadcastVariablesCallback().on_train_begin()


def test_the_hook_lives_with_a_monitored_session_that_has_tables():
    with tf.Graph().as_default():
        table = sok.EmbeddingVariable(2, 10, name="monitored", initializer="ones")
        weight = v1.get_variable("weight", initializer=[1.0, 2.0])
        loss = tf.reduce_sum(lookup_rows(table, tf.constant([3], tf.int64)) * weight)
        optimizer = sok.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
        train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        rows = lookup_rows(table, tf.constant([3], tf.int64), training=False)
        hooks = [sok.hooks.BroadcastVariablesHook(), v1.train.StopAtStepHook(last_step=1)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            session.run(train)
            assert session.should_stop()
            raw = session._tf_sess()
            np.testing.assert_allclose(raw.run(rows), [[0.5, 0.0]])
            np.testing.assert_allclose(raw.run(weight), [0.5, 1.5])


def test_eager_steps_are_counted_by_the_variables_themselves():
    old = tf.Variable(1.0)
    replicas.told([old])
    for _ in range(20):  # one of them lies where one before has lain
        new = tf.Variable([1.0])
        replicas.told([old])
        told = [replicas.told([new]).numpy() for _ in range(3)]
        assert [t[0] for t in told] == [0.0, 1.0, 0.0] and told[1][1] > 0
        del new
    newcomer = tf.Variable(3.0)
    replicas.told([newcomer])
    both = replicas.told([old, newcomer]).numpy()
    assert both[:2].tolist() == [1.0, 0.0] and both[2] > 0, "each variable is compared once"
