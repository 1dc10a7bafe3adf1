"""Several real workers, each with tables on an emulated GPU of its own."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.multiprocess.harness import run_checks
from tests.multiprocess.worker import checks_of

from . import checks_tiers
from .conftest import GPU

pytestmark = pytest.mark.multiprocess

DEADLINE = 240.0


def test_what_several_workers_save_one_restores(tmp_path):
    job = run_checks(["tests.device.checks_workers"], 2, tmp_path, DEADLINE)
    job.values("check_changes_are_saved_beside_training_by_all")
    saved = job.values("check_tables_are_saved_and_restored_by_all")
    with tf.device(GPU):
        table = sok.EmbeddingVariable(3, 100, seed=1, name="of_all")
    sok.restore(saved[0][0], {"shared": table})
    rows = {key: row for _, mine in saved for key, row in mine.items()}
    assert len(rows) == 40
    found = dict(zip(*(tensor.numpy().tolist() for tensor in table.export()), strict=True))
    np.testing.assert_array_equal([found[key] for key in sorted(rows)], [rows[key] for key in sorted(rows)])
    assert found.keys() == rows.keys()


def test_rows_in_use_on_gpus_are_those_of_one_worker(tmp_path):
    """With policies, and with little room."""
    job = run_checks(["tests.device.checks_tiers"], 2, tmp_path, DEADLINE)
    for check in checks_of(checks_tiers):
        job.values(check)
