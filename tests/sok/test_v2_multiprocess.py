"""SOK v2's names on two and three workers: what one worker gives on the concatenated batch."""

import numpy as np
import pytest
import tensorflow as tf

from tests.multiprocess.harness import World, run_checks
from tests.multiprocess.worker import checks_of
from tests.sok import v2_checks

pytestmark = pytest.mark.multiprocess
DEADLINE = 300.0
TRAINING = ["check_v2_training_eagerly", "check_v2_training_in_a_function", "check_v2_training_in_a_session"]


@pytest.fixture(scope="module", params=[2, 3])
def job(request, tmp_path_factory):
    return run_checks(["tests.sok.v2_checks"], request.param, tmp_path_factory.mktemp("v2"), DEADLINE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One worker in a process of its own: rows are drawn by name, and here others may have taken the names."""
    return run_checks(["tests.sok.v2_checks"], 1, tmp_path_factory.mktemp("v2_alone"), DEADLINE)


def stock_training(matrices, combiners):
    """What `check_v2_training_in_a_session` does, by stock TensorFlow on the whole batch."""
    twins = [tf.Variable(matrix) for matrix in matrices]
    for step in range(v2_checks.STEPS):
        ids, _ = v2_checks.batch(step, World(0, 1))
        with tf.GradientTape() as tape:
            pooled = [
                tf.nn.embedding_lookup_sparse(twin, i.to_sparse(), None, combiner=combiner)
                for twin, i, combiner in zip(twins, ids, combiners, strict=False)
            ]
            loss = tf.add_n([tf.reduce_sum(p**2) for p in pooled])
        for twin, gradient in zip(twins, tape.gradient(loss, twins), strict=True):
            twin.assign_sub(0.05 * tf.convert_to_tensor(gradient))
    return [twin.numpy() for twin in twins]


@pytest.mark.parametrize("check", TRAINING)
def test_workers_train_to_the_rows_of_one(job, alone, check):
    (expected,) = alone.values(check)
    for found in job.values(check):
        for rows, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(rows, other, rtol=1e-5, atol=1e-6)


def test_one_worker_trains_to_the_rows_of_tensorflow(alone):
    expected = stock_training([v2_checks.MATRIX, v2_checks.WIDE], ["sum", "mean"])
    (found,) = alone.values("check_v2_training_in_a_session")
    for rows, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, other, rtol=1e-5, atol=1e-6)


def test_workers_with_a_wrapped_optimizer_train_to_the_rows_of_one(job, alone):
    (expected,) = alone.values("check_v2_wrapped_optimizers")
    for found in job.values("check_v2_wrapped_optimizers"):
        assert found.keys() == expected.keys() == v2_checks.WRAPPED.keys()
        for name, arrays in expected.items():
            for array, other in zip(found[name], arrays, strict=True):
                np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-5, err_msg=name)


def test_rows_of_an_initializer_do_not_depend_on_the_number_of_workers(job, alone):
    drawn, (expected,) = job.values("check_v2_initial_values"), alone.values("check_v2_initial_values")
    for rank, rows in enumerate(drawn):
        np.testing.assert_array_equal(rows, expected[rank :: len(drawn)])


@pytest.mark.parametrize("check", [name for name in checks_of(v2_checks) if name not in TRAINING])
def test_check_passes_on_every_worker(job, alone, check):
    job.values(check)
    alone.values(check)
