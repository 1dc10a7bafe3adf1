import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.reference.judge import assert_close, assert_same
from tests.reference.segment_sum import unsorted_segment_sum, unsorted_segment_sum_grad

DTYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("ids_shape", "inner", "num_segments"),
    [
        ((0,), (3,), 4),
        ((1,), (1,), 1),
        ((50,), (7,), 9),
        ((6, 5), (4,), 3),
        ((20,), (), 5),
        ((9,), (2, 3), 4),
        ((5,), (0,), 2),
    ],
)
def test_sums_agree_with_numpy(lib, rng, dtype, ids_dtype, ids_shape, inner, num_segments):
    data = rng.normal(size=ids_shape + inner).astype(dtype.as_numpy_dtype)
    ids = rng.integers(-1, num_segments, ids_shape).astype(ids_dtype)
    got = lib.sok_unsorted_segment_sum(data, ids, num_segments)
    assert got.dtype == dtype
    assert_close(got, unsorted_segment_sum(data, ids, num_segments), factor=4)  # up to 50 addends of size 1


@pytest.mark.parametrize("case", ["all_equal", "all_distinct", "skewed", "all_dropped", "none"])
def test_sums_split_over_threads_agree_with_tensorflow(lib, call, rng, case):
    n, segments = 20_000, 3_000
    ids = {
        "all_equal": np.full(n, 7),
        "all_distinct": rng.permutation(n) % segments,
        "skewed": rng.zipf(1.2, n) % segments,
        "all_dropped": np.full(n, -1),
        "none": np.zeros(0, np.int64),
    }[case].astype(np.int64)
    data = tf.constant(rng.normal(size=(len(ids), 8)), tf.float32)
    got = call(lib.sok_unsorted_segment_sum, data, tf.constant(ids), tf.constant(segments))
    # Addends are of size 1 and up to n of them cancel.
    assert_close(got, tf.math.unsorted_segment_sum(data, ids, segments), scale=np.sqrt(n))


def test_sums_of_half_precision_keep_small_addends(lib):
    # In float16, 2048 + 1 is 2048: summed as it stands, everything after the first 2048 ones would be lost.
    got = lib.sok_unsorted_segment_sum(tf.ones([4096, 1], tf.float16), tf.zeros([4096], tf.int32), 1)
    assert got.numpy().item() == 4096


def test_sums_repeat_bit_for_bit(lib, rng):
    data, ids = rng.normal(size=(30_000, 5)).astype(np.float32), rng.integers(0, 50, 30_000)
    first = lib.sok_unsorted_segment_sum(data, ids, 50)
    for _ in range(5):
        assert_same(lib.sok_unsorted_segment_sum(data, ids, 50), first)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-100, 100)), max_size=60))
def test_a_segment_sum_keeps_the_total(pairs):
    ids = np.array([s for s, _ in pairs], np.int64)
    data = np.array([[v] for _, v in pairs], np.float32).reshape(-1, 1)
    got = _ops.lib().sok_unsorted_segment_sum(data, ids, 7)
    assert got.numpy().sum() == data.sum()  # whole numbers: exact


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("ids", [np.array([2, 0, -1, 2, 1]), np.array([[2, 0], [-1, 2]])])
def test_gradient_gathers(lib, call, rng, dtype, ids):
    data = tf.constant(rng.normal(size=ids.shape + (3,)), dtype)
    upstream = rng.normal(size=(4, 3)).astype(dtype.as_numpy_dtype)

    def gradient(data):
        with tf.GradientTape() as tape:
            tape.watch(data)
            loss = tf.reduce_sum(lib.sok_unsorted_segment_sum(data, ids, 4) * upstream)
        return tape.gradient(loss, data)

    assert_same(call(gradient, data), unsorted_segment_sum_grad(upstream, ids))


def test_gradient_agrees_with_differences(lib, rng):
    data, ids = tf.constant(rng.normal(size=(6, 2)), tf.float64), np.array([0, 1, 1, -1, 2, 0])
    theory, numeric = tf.test.compute_gradient(lambda x: lib.sok_unsorted_segment_sum(x, ids, 3) ** 2, [data])
    np.testing.assert_allclose(theory, numeric, rtol=1e-6, atol=1e-8)


def test_shapes_are_inferred(lib):
    with tf.Graph().as_default():
        data = tf.compat.v1.placeholder(tf.float32, [None, 2, 3])
        ids = tf.compat.v1.placeholder(tf.int64, [None, 2])
        assert lib.sok_unsorted_segment_sum(data, ids, 5).shape.as_list() == [5, 3]
        unknown = tf.compat.v1.placeholder(tf.int32, [])
        assert lib.sok_unsorted_segment_sum(data, ids, unknown).shape.as_list() == [None, 3]
        with pytest.raises(ValueError):
            lib.sok_unsorted_segment_sum(data, tf.compat.v1.placeholder(tf.int64, [None, 4]), 5)


@pytest.mark.parametrize(
    ("ids", "num_segments", "text"),
    [
        ([0, 3], 3, r"segment_ids\[1\] = 3 must be below num_segments = 3"),
        ([0, 1], -1, "`num_segments` .*: -1"),
        ([0, 1, 2], 3, r"`data` .*shape .*`segment_ids`"),
        ([0, 1], [3, 3], "`num_segments` must have rank 0"),
    ],
)
def test_bad_arguments_are_named(lib, ids, num_segments, text):
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        lib.sok_unsorted_segment_sum(tf.zeros([2, 3]), np.array(ids, np.int64), num_segments)


def test_other_dtypes_are_refused(lib):
    with pytest.raises((tf.errors.InvalidArgumentError, TypeError), match="int32"):
        lib.sok_unsorted_segment_sum(tf.zeros([2, 3], tf.int32), tf.zeros([2], tf.int32), 3)


@pytest.mark.parametrize("num_segments", [2**62, 2**63 - 1])
def test_more_segments_than_memory_is_an_error(lib, num_segments):
    with pytest.raises((tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError)):
        lib.sok_unsorted_segment_sum(tf.zeros([2, 3]), tf.zeros([2], tf.int64), tf.constant(num_segments, tf.int64))
