"""Tables on the devices of several workers give what one worker's table on the CPU gives."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.multiprocess.harness import run_checks
from tests.multiprocess.worker import checks_of

from . import checks_exchange as checks
from . import checks_sums
from .conftest import IS_EMULATED

pytestmark = pytest.mark.multiprocess
DEADLINE = 240.0  # half a minute is usual on two idle cores


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    done = {}

    def get(ranks):
        if ranks not in done:
            folder = tmp_path_factory.mktemp(f"device{ranks}")
            modules = ["tests.device.checks_exchange", "tests.device.checks_sums"]
            modules += ["tests.device.checks_counts"] * (ranks == 2 and IS_EMULATED)
            done[ranks] = run_checks(modules, ranks, folder, DEADLINE)
        return done[ranks]

    return get


@pytest.mark.parametrize("check", [*checks_of(checks), *checks_of(checks_sums)])
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


@pytest.mark.skipif(not IS_EMULATED, reason="the emulator counts")
@pytest.mark.parametrize(
    "check, most",
    [
        # What goes to the host, answers and gradients, is waited for.
        ("check_what_a_step_asks_for", dict(launches=37, copies=10, to_device=8, to_host=2, marks=20, host_waits=0)),
        # Here also how many keys go to each worker, and those keys, once: by waits of our own.
        (
            "check_what_a_step_with_ids_of_the_device_asks_for",
            dict(launches=45, copies=14, to_device=10, to_host=4, marks=22, host_waits=2),
        ),
    ],
)
def test_a_step_of_two_workers_asks_for_no_more(job, check, most):
    """One feature and 58 (docs/design/cuda.md)."""
    for counted in job(2).values(check):
        for counts in counted.values():
            assert {name: counts[name] for name in most if counts[name] > most[name]} == {}
            assert counts["launches"] > 20  # something was counted
