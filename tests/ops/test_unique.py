import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.ops.shapes import SHAPES, make_keys
from tests.reference.judge import assert_same
from tests.reference.keys import KEY_DTYPES
from tests.reference.unique import unique


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_unique_gives_first_appearances_places_and_counts(lib, rng, shape, dtype):
    x = make_keys(shape, dtype, rng)
    y, idx, counts = lib.sok_unique(x)
    assert y.dtype == dtype and idx.dtype == counts.dtype == tf.int32
    for got, expected in zip((y, idx, counts), unique(x), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("out_idx", [tf.int32, tf.int64])
def test_unique_agrees_with_tensorflow(lib, call, rng, out_idx):
    x = tf.constant(make_keys("skewed", np.int64, rng))
    got = call(lambda x: tuple(lib.sok_unique(x, out_idx=out_idx)), x)
    for ours, theirs in zip(got, tf.unique_with_counts(x, out_idx=out_idx), strict=True):
        assert ours.dtype == theirs.dtype
        assert_same(ours, theirs)


def test_unique_does_not_depend_on_how_keys_were_made_up(lib):
    # Keys that share their low or their high bits fall on the same place in a bad hash table.
    for x in (np.arange(70_000, dtype=np.int64) << 32, np.arange(70_000, dtype=np.int64) << 44 | 7):
        y, idx, counts = lib.sok_unique(x)
        assert_same(y, x)
        assert_same(idx, np.arange(70_000))
        assert np.all(counts.numpy() == 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=80))
def test_unique_values_at_their_places_give_the_input_back(keys):
    x = np.array(keys, np.int64)
    y, idx, counts = (t.numpy() for t in _ops.lib().sok_unique(x))
    assert_same(y[idx], x)
    assert len(set(y.tolist())) == len(y)
    assert counts.sum() == len(x)


def test_unique_infers_its_shapes(lib):
    with tf.Graph().as_default():
        y, idx, counts = lib.sok_unique(tf.compat.v1.placeholder(tf.int64, [12]))
        assert y.shape.as_list() == [None] and idx.shape.as_list() == [12] and counts.shape.as_list() == [None]
        with pytest.raises(ValueError, match="rank 1"):
            lib.sok_unique(tf.compat.v1.placeholder(tf.int64, [2, 2]))


def test_unique_of_a_matrix_is_refused(lib, call):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="rank 1"):
        call(lib.sok_unique, tf.zeros([2, 2], tf.int64))


def test_unique_has_no_gradient(lib):
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.int64, [3])
        assert tf.gradients(tf.cast(lib.sok_unique(x)[0], tf.float32), x) == [None]
