"""SOK v2's names on two and three workers: what one worker gives on the concatenated batch."""

import numpy as np
import pytest
import tensorflow as tf

from tests.multiprocess import checks_v2
from tests.multiprocess.harness import World

pytestmark = pytest.mark.multiprocess
TRAINING = ["check_v2_training_eagerly", "check_v2_training_in_a_function", "check_v2_training_in_a_session"]


def stock_training(matrices, combiners):
    """What `check_v2_training_in_a_session` does, by stock TensorFlow on the whole batch."""
    twins = [tf.Variable(matrix) for matrix in matrices]
    for step in range(checks_v2.STEPS):
        ids, _ = checks_v2.batch(step, World(0, 1))
        with tf.GradientTape() as tape:
            pooled = [
                tf.nn.embedding_lookup_sparse(twin, i.to_sparse(), None, combiner=combiner)
                for twin, i, combiner in zip(twins, ids, combiners, strict=False)
            ]
            loss = tf.add_n([tf.reduce_sum(p**2) for p in pooled])
        for twin, gradient in zip(twins, tape.gradient(loss, twins), strict=True):
            twin.assign_sub(0.05 * tf.convert_to_tensor(gradient))
    return [twin.numpy() for twin in twins]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("check", TRAINING)
def test_workers_train_to_the_rows_of_one(job, ranks, check):
    (expected,) = job(1).values(check)
    for found in job(ranks).values(check):
        for rows, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(rows, other, rtol=1e-5, atol=1e-6)


def test_one_worker_trains_to_the_rows_of_tensorflow(job):
    expected = stock_training([checks_v2.MATRIX, checks_v2.WIDE], ["sum", "mean"])
    (found,) = job(1).values("check_v2_training_in_a_session")
    for rows, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_workers_with_a_wrapped_optimizer_train_to_the_rows_of_one(job, ranks):
    (expected,) = job(1).values("check_v2_wrapped_optimizers")
    for found in job(ranks).values("check_v2_wrapped_optimizers"):
        assert found.keys() == expected.keys() == checks_v2.WRAPPED.keys()
        for name, arrays in expected.items():
            for array, other in zip(found[name], arrays, strict=True):
                np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_an_initializer_do_not_depend_on_the_number_of_workers(job, ranks):
    drawn, (expected,) = (job(n).values("check_v2_initial_values") for n in (ranks, 1))
    for rank, rows in enumerate(drawn):
        np.testing.assert_array_equal(rows, expected[rank :: len(drawn)])
