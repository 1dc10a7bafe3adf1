"""Optimizers on two ranks: what one rank gives, and errors that all of them raise."""

import numpy as np
import pytest

from tests.multiprocess.harness import World, run_checks
from tests.sok import optimizer_checks

pytestmark = pytest.mark.multiprocess
RANKS, DEADLINE = 2, 240.0


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return run_checks(["tests.sok.optimizer_checks"], RANKS, tmp_path_factory.mktemp("optimizers"), DEADLINE)


def test_two_ranks_train_to_the_rows_of_one(job):
    ranks = job.values("check_training")
    alone = optimizer_checks.check_training(World(0, 1))
    assert len(alone) == len(optimizer_checks.CASES)
    for found in ranks:
        assert found.keys() == alone.keys()
        for case, tables in alone.items():
            for actual, expected in zip(found[case], tables, strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=case)


@pytest.mark.parametrize(
    "check",
    [
        "check_a_bad_gradient_on_the_last_rank_raises_on_all",
        "check_clipping_costs_one_collective_for_all_tables",
    ],
)
def test_ranks_agree(job, check):
    # A check asserts; that it ended on a rank is the value that came from there.
    assert len(job.values(check)) == RANKS
    getattr(optimizer_checks, check)(World(0, 1))
