"""sok.tf: the same as TensorFlow's functions of these names."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok

DTYPES = [tf.int64, tf.int32, tf.uint32, tf.uint64, tf.float32, tf.int16]  # the last two go to TensorFlow's own


@pytest.mark.parametrize("out_idx", [tf.int32, tf.int64], ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_unique_is_tensorflows(dtype, out_idx, rng, call):
    x = tf.cast(tf.constant(rng.integers(0, 50, 300)), dtype)
    for ours, theirs in ((sok.tf.unique, tf.unique), (sok.tf.unique_with_counts, tf.unique_with_counts)):
        actual, expected = call(lambda x, f=ours: f(x, out_idx=out_idx), x), theirs(x, out_idx=out_idx)
        assert type(actual)._fields == type(expected)._fields
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == e.dtype
            np.testing.assert_array_equal(a, e)


def test_unique_takes_lists_strings_and_nothing():
    assert sok.tf.unique([5, 5, 2]).idx.numpy().tolist() == [0, 0, 1]
    assert sok.tf.unique(["a", "b", "a"]).y.numpy().tolist() == [b"a", b"b"]
    assert sok.tf.unique_with_counts(tf.zeros([0], tf.int64)).count.shape == [0]


@pytest.mark.parametrize("function", [sok.tf.unique, tf.unique])
def test_unique_of_a_matrix_is_an_error_in_both(function):
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(tf.zeros([2, 2], tf.int64))


SUMMED = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.complex64]


@pytest.mark.parametrize("dtype", SUMMED, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(40,), (40, 3), (8, 5, 2)], ids=str)
def test_unsorted_segment_sum_is_tensorflows(dtype, shape, rng, call):
    data = tf.cast(tf.constant(rng.integers(-4, 5, shape)), dtype)  # whole numbers: every order of adding agrees
    ids = tf.constant(rng.integers(-1, 6, shape[: max(1, len(shape) - 1)]))
    actual = call(lambda d, i: sok.tf.unsorted_segment_sum(d, i, 7), data, ids)
    expected = tf.math.unsorted_segment_sum(data, ids, 7)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def test_gradients_are_tensorflows_to_the_second_order(rng):
    data, ids = tf.constant(rng.normal(size=(30, 4))), tf.constant(rng.integers(-1, 5, 30))

    def gradients(segment_sum):
        with tf.GradientTape() as outer:
            outer.watch(data)
            with tf.GradientTape() as inner:
                inner.watch(data)
                loss = tf.reduce_sum(segment_sum(data, ids, tf.constant(6, tf.int64)) ** 3)
            first = inner.gradient(loss, data)
            again = tf.reduce_sum(first**2)
        return first, outer.gradient(again, data)

    for ours, theirs in zip(
        gradients(sok.tf.unsorted_segment_sum), gradients(tf.math.unsorted_segment_sum), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("function", [sok.tf.unsorted_segment_sum, tf.math.unsorted_segment_sum])
def test_an_id_beyond_the_segments_is_an_error_in_both(function):
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(tf.ones([2]), tf.constant([0, 3]), 3)


@pytest.mark.parametrize(
    "given, scale, moves", [((1024,), 1024.0, False), (("dynamic",), 2.0**15, True), ((), 2.0**15, True)]
)
def test_a_loss_scale_may_be_given_as_sok_v1_has_it(given, scale, moves, monkeypatch):
    monkeypatch.setattr(tf.keras, "mixed_precision", tf_keras.mixed_precision)  # as TF_USE_LEGACY_KERAS=1 does
    for optimizer in (tf_keras.optimizers.legacy.Adam(0.1), sok.optimizers.Adam(0.1)):
        scaler = sok.tf.keras.mixed_precision.LossScaleOptimizer(optimizer, *given)
        assert (float(scaler.loss_scale), scaler.dynamic) == (scale, moves)
