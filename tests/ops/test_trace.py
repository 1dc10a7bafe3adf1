import json

import numpy as np
import pytest
import tensorflow as tf

from tests.messages import saying
from tests.reference.judge import assert_same


@pytest.fixture(autouse=True)
def fresh_counts(lib):
    lib.sok_trace_read(True)
    yield
    lib.sok_trace_read(True)


def read(lib, reset=False):
    return json.loads(lib.sok_trace_read(reset).numpy())


def test_collectives_and_bytes_are_counted_when_they_run(lib):
    @tf.function
    def step(x):
        return lib.sok_trace_collective(x, [], collective="sok/item/keys", kind="all_to_all")

    x = tf.ones([3, 2])
    for _ in range(2):
        assert_same(step(x), x)
    lib.sok_trace_collective(tf.zeros([5], tf.int64), [], collective='a "quoted" \\ name', kind="barrier")
    counts = read(lib)
    assert all(one.pop("seconds") == 0 for one in counts["by_name"].values())  # none is done
    assert counts == {
        "collectives": 3,
        "bytes": 2 * 24 + 40,
        "by_name": {
            "sok/item/keys": {"kind": "all_to_all", "collectives": 2, "bytes": 48},
            'a "quoted" \\ name': {"kind": "barrier", "collectives": 1, "bytes": 40},
        },
    }


def test_reading_with_reset_starts_again(lib):
    lib.sok_trace_collective(1.0, [], collective="a", kind="k")
    assert read(lib, reset=True)["collectives"] == 1
    assert read(lib) == {"collectives": 0, "bytes": 0, "by_name": {}}


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32, tf.bool, tf.float64])
def test_tensors_of_any_type_pass_unchanged(lib, call, dtype):
    x = tf.cast(np.array([[0, 1, 2]]), dtype)
    y = call(lambda x: lib.sok_trace_collective(x, [], collective="a", kind="k"), x)
    assert y.dtype == dtype and y.shape == [1, 3]
    assert_same(y, x)


def test_gradients_pass(lib):
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = 2.0 * lib.sok_trace_collective(x, [], collective="a", kind="k")
    assert tape.gradient(y, x) == 2.0


def test_reset_must_be_a_scalar(lib):
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`reset`", "rank 0")):
        lib.sok_trace_read([True])
