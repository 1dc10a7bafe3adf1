"""Wide & Deep by feature columns: the group scope and a second worker change nothing but the time."""

import json
import re

import numpy as np
import pytest

SETTINGS = ("--rows", 3000, "--batch-size", 128, "--steps", 20, "--buckets", 1000)


@pytest.fixture
def losses(example, tmp_path):
    """The loss of each step, summed over the workers."""

    def run(*arguments, workers=1):
        target = tmp_path / f"losses_{workers}_{len(arguments)}"
        options = (*SETTINGS, "--cache", tmp_path, "--losses", target, *arguments)
        status, out, err = example("deeprec_wdl.py", *options, workers=workers)
        assert status == 0, out + err
        first, last = map(float, re.search(r"loss (\d\.\d+) at first, (\d\.\d+) at last", out).groups())
        assert last < first
        return np.sum([json.loads(target.with_name(f"{target.name}.{r}").read_text()) for r in range(workers)], axis=0)

    return run


def test_scope_and_workers_change_no_loss(losses):
    alone = losses()
    assert len(alone) == 20 and alone[-1] < 0.95 * alone[0]
    # Sums in another order.
    np.testing.assert_allclose(losses("--no-group-scope"), alone, rtol=1e-4)
    np.testing.assert_allclose(losses(workers=2), alone, rtol=1e-4)
    ahead = losses("--no-group-scope", "--capacity", 2, workers=2)  # lookups begin two steps before theirs
    np.testing.assert_allclose(ahead, alone, rtol=1e-4)


def test_on_a_real_log(example, criteo_sample):
    status, out, err = example("deeprec_wdl.py", "--steps", 30, SOK_CRITEO_DATA=criteo_sample)
    assert status == 0, out + err
    assert re.search(r"worker 0 of 1: loss .* [1-9][0-9]* steps", out)
