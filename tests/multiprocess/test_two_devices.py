"""Tables that the host keeps train beside those of another device."""

import sys

import pytest

from tests.multiprocess.harness import run

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_tables_on_two_devices_trains_as_on_one(ranks):
    job = run([sys.executable, "-m", "tests.multiprocess.two_devices"], ranks, 240.0)
    assert job.returncode == 0 and not job.timed_out, job.output[-4000:]
    assert all(f"rank {rank} has done all" in job.output for rank in range(ranks))
