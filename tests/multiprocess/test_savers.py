"""What several workers have saved, read by one."""

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


@pytest.mark.filterwarnings("ignore:.*has another seed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_worker_loads_weights_that_several_have_saved(job, ranks):
    path, rows, bias = job(ranks).values("check_weights_of_keras_models_are_saved_by_all_workers")[0]
    model, table = checks_savers.model_with_table()
    sok.load_weights(model, path)
    np.testing.assert_array_equal(table.sparse_read(checks_savers.KEYS), rows)
    np.testing.assert_array_equal(model.layers[-1].get_weights()[1], bias)
