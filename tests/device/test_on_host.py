"""Tables that a GPU has no room for lie in the memory of its host, and one model trains both."""

import numpy as np
import pytest
import tensorflow as tf

import distributed_embeddings as de
import sok
from tests import tables_on_host as on_host

from .conftest import GPU

PLACEMENTS = [sok.table_wise(0), sok.column_wise(2), sok.row_wise(), sok.row_wise()]
OWNERS = [sok.table_wise(0), sok.column_wise(2), sok.table_wise(0), sok.table_wise(0)]


@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("dp_input", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_a_model_of_both_trains_as_on_the_cpu(name, dp_input, as_function):
    placements = PLACEMENTS if dp_input else OWNERS
    found, expected = (
        on_host.train(device, placements, 0, 1, as_function, dp_input, getattr(sok.optimizers, name)(0.1))
        for device in (GPU, "/CPU:0")
    )
    on_host.assert_same(found, expected)
    assert found[0][-1] < found[0][0]


def test_norms_are_those_of_both():
    """Squares of both devices are added up."""
    found, expected = (
        on_host.train(device, PLACEMENTS, 0, 1, True, True, sok.optimizers.SGD(0.1, global_clipnorm=0.5))
        for device in (GPU, "/CPU:0")
    )
    on_host.assert_same(found, expected)


@pytest.mark.parametrize("limit", [None, 0, 250])
def test_merlins_limit_says_which_tables_the_host_keeps(limit):
    sizes = [(100, 4), (10, 4), (50, 4), (20, 3)]  # 400, 40, 200 and 60 elements
    hosted = {None: [False] * 4, 0: [True] * 4, 250: [True, False, True, False]}[limit]
    with tf.device(GPU):
        layers = [de.Embedding(rows, dim, combiner="sum") for rows, dim in sizes]
        layer = de.DistributedEmbedding(layers, gpu_embedding_size=limit)
        outputs = layer([tf.constant([[1, 2]])] * 4)
    assert on_host.devices_of(layer) == ["CPU:0" if one else GPU.strip("/") for one in hosted]
    for out, matrix in zip(outputs, layer.get_weights(), strict=True):
        np.testing.assert_allclose(out[0], matrix[1] + matrix[2], rtol=1e-6)


def test_a_table_is_on_the_host_whatever_device_is_around_it(tmp_path):
    with tf.device(GPU):
        table = sok.EmbeddingVariable(3, 100, name="kept_by_the_host", on_host=True)
        assert "CPU" in table.handle.device and "GPU" not in table.handle.device
        rows = table.sparse_read(tf.constant([5, 7], tf.int64)).numpy()
        sok.save(tmp_path, [table])
        table.assign([5], np.zeros([1, 3], np.float32))
        sok.restore(tmp_path, [table])
        assert "GPU" not in table.handle.device
        np.testing.assert_array_equal(table.sparse_read(tf.constant([5, 7], tf.int64)), rows)
