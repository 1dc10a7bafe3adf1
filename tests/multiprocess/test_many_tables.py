"""A thousand small tables, placed in five ways, train on two workers as on one."""

import os

import numpy as np
import pytest

from tests.multiprocess.checks_many_tables import STEPS, TABLES
from tests.multiprocess.harness import run_checks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not os.environ.get("SOK_TEST_SLOW"), reason="takes minutes; set SOK_TEST_SLOW=1"),
]


def test_a_thousand_tables_train_on_two_workers_as_on_one(tmp_path):
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        job = run_checks(["tests.multiprocess.checks_many_tables"], ranks, folder, 900.0)
        found.append(job.values("check_a_thousand_tables"))
    (alone,), of_two = found
    np.testing.assert_allclose(np.sum([one["losses"] for one in of_two], 0), alone["losses"], rtol=1e-5)
    assert alone["losses"][-1] < alone["losses"][0] and len(alone["losses"]) == STEPS
    for one in of_two:
        assert one["names"] == alone["names"] and len(one["rows"]) == TABLES
        for rows, expected in zip(one["rows"], alone["rows"], strict=True):
            np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
