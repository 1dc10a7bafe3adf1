"""Tables on the devices of several workers give what one worker's table on the CPU gives."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.multiprocess.harness import run_checks
from tests.multiprocess.worker import checks_of

from . import checks_exchange as checks

pytestmark = pytest.mark.multiprocess
DEADLINE = 240.0  # half a minute is usual on two idle cores


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    done = {}

    def get(ranks):
        if ranks not in done:
            folder = tmp_path_factory.mktemp(f"device{ranks}")
            done[ranks] = run_checks(["tests.device.checks_exchange"], ranks, folder, DEADLINE)
        return done[ranks]

    return get


@pytest.mark.parametrize("check", checks_of(checks))
@pytest.mark.parametrize("ranks", [2, 3])
def test_check_passes_on_all_ranks(job, ranks, check):
    job(ranks).values(check)


@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_that_of_one_worker_on_the_cpu(job, ranks, case):
    found = [values[case] for values in job(ranks).values("check_training")]
    steps, before, after = checks.train("/CPU:0", case, range(ranks))
    for of_rank in found:
        for rows, expected in zip(of_rank[1], before, strict=True):
            np.testing.assert_array_equal(rows, expected)
        for rows, expected in zip(of_rank[2], after, strict=True):
            np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=2e-6)
    assert any(np.abs(a - b).max() > 0.01 for a, b in zip(after, before, strict=True))
    for step, (outputs, of_weights) in enumerate(steps):
        for f, expected in enumerate(outputs):
            together = np.concatenate([of_rank[0][step][0][f] for of_rank in found])
            np.testing.assert_allclose(together, expected, rtol=2e-5, atol=2e-6)
        for w, expected in enumerate(of_weights):
            together = np.concatenate([of_rank[0][step][1][w] for of_rank in found])
            np.testing.assert_allclose(together, tf.convert_to_tensor(expected), rtol=2e-5, atol=2e-5)
