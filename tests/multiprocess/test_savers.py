"""What several workers have saved, read by one with TensorFlow's own saver, and the other way round."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.multiprocess import checks_savers
from tests.sok.checkpoint_cases import DIM

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_worker_reads_what_several_have_saved(job, ranks):
    path, rows = job(ranks).values("check_a_manager_saves_the_rows_of_all_workers")[0]
    table, optimizer = sok.EmbeddingVariable(DIM, 200, name="from_several", seed=5), sok.optimizers.Adam(0.01)
    checkpoint = tf.train.Checkpoint(table=table, optimizer=optimizer, weight=tf.Variable(0.0))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(table.sparse_read(checks_savers.KEYS), rows)
    assert (int(optimizer.iterations), float(checkpoint.weight)) == (15, 3.0)
