"""What a training step asks of a device, counted by the emulator: no more than this (docs/design/cuda.md)."""

import numpy as np
import pytest
import tensorflow as tf

import sok

from . import counting
from .conftest import GPU


@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32], ids=["int64", "int32"])
@pytest.mark.parametrize(
    ("features", "most"),
    [
        (1, {"launches": 24, "to_device": 1, "to_host": 0, "sets": 2, "marks": 8, "waits": 7, "host_waits": 0}),
        (58, {"launches": 24, "to_device": 5, "to_host": 0, "sets": 1, "marks": 12, "waits": 7, "host_waits": 0}),
    ],
)
def test_a_step_asks_for_no_more(features, most, key_dtype):
    counts = counting.of_a_step(features, 0, False, key_dtype)
    assert {name: getattr(counts, name) for name in most if getattr(counts, name) > most[name]} == {}
    assert counts.launches > 10  # something was counted


FORMS = {
    "ragged": lambda: tf.RaggedTensor.from_row_splits(
        tf.constant([3, 1, 7], tf.int64), tf.constant([0, 1, 3], tf.int64)
    ),
    "dense": lambda: tf.constant([[3, 1], [7, 7], [2, 3]], tf.int64),
}


def looked_up(form, device, ids_on, as_function):
    """Pooled vectors and the copies of the last of three lookups, of two tables."""
    with tf.device(device):
        tables = [sok.EmbeddingVariable(d, 100, seed=d, name=f"counts_{d}") for d in (4, 6)]
    with tf.device(ids_on):
        ids = FORMS[form]()

    def call(ids):
        with tf.device(device):
            return sok.group_embedding_lookup_sparse(tables, [ids, ids], ["sum", "mean"])

    run = tf.function(call) if as_function else call
    for _ in range(2):
        run(ids)
    counting.wait()
    before = counting.so_far()
    outputs = run(ids)
    counting.wait_for_host()
    counted = counting.so_far() - before
    return [o.numpy() for o in outputs], counted


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_ids_of_the_host_go_to_the_device_by_one_copy(form, as_function):
    found, counts = looked_up(form, GPU, "/CPU:0", as_function)
    expected, _ = looked_up(form, "/CPU:0", "/CPU:0", as_function)
    for output, of_cpu in zip(found, expected, strict=True):
        np.testing.assert_allclose(output, of_cpu, rtol=1e-6)
    assert (counts.to_device, counts.pageable, counts.to_host) == (1, 0, 0)


def test_ids_on_the_device_stay_there():
    found, counts = looked_up("ragged", GPU, GPU, False)
    expected, _ = looked_up("ragged", "/CPU:0", "/CPU:0", False)
    for output, of_cpu in zip(found, expected, strict=True):
        np.testing.assert_allclose(output, of_cpu, rtol=1e-6)
    assert counts.to_host == 0
