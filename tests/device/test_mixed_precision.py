"""Mixed precision with tables on a GPU: the tests of the CPU, run there."""

import pytest
import tensorflow as tf

import sok
from tests.sok import test_mixed_precision as cases

from .conftest import GPU

library = cases.library

test_vectors_are_short = cases.test_vectors_are_short_and_rows_and_gradients_are_not
test_scaled_losses = cases.test_a_scaled_loss_trains_as_one_that_is_not
test_steps_that_overflow = cases.test_steps_that_overflow_are_left_out


@pytest.fixture(autouse=True)
def on_the_gpu():
    sok.Init()
    with tf.device(GPU):
        yield


def test_tables_of_layers_are_there(library):
    layer = cases.layer_of(library, "pooled", "mixed_float16")
    layer(tf.constant([[[1], [2]]], tf.int64))
    assert layer.embedding_variable.handle.device.endswith("GPU:0")
