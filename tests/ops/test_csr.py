import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.ops.shapes import report
from tests.reference.csr import sparse_to_csr
from tests.reference.judge import assert_same
from tests.reference.keys import KEY_DTYPES, extreme_keys

ROWS = {
    "no_keys": ([], 3),
    "no_rows": ([], 0),
    "one": ([0], 1),
    "sorted": ([0, 0, 2, 2, 4], 5),
    "unsorted": ([4, 0, 2, 0, 4, 2, 1], 6),
    "all_in_one_row": ([2] * 9, 4),
}


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("case", ROWS)
def test_keys_come_row_by_row_in_stable_order(lib, rng, dtype, weighted, case):
    row, num_rows = np.array(ROWS[case][0], np.int64), ROWS[case][1]
    keys = rng.choice(extreme_keys(dtype), len(row))
    weights = rng.normal(size=len(row) if weighted else 0).astype(np.float32)
    splits, order = sparse_to_csr(row, num_rows)
    got = lib.sok_sparse_to_csr(row, keys, weights, num_rows)
    assert_same(got.row_splits, splits)
    assert_same(got.csr_keys, keys[order])
    assert_same(got.csr_weights, weights[order] if weighted else weights)
    assert_same(got.order, order)


@pytest.mark.parametrize("shuffled", [False, True], ids=["in_order", "in_any"])
@pytest.mark.parametrize("columns", [2, 3])
def test_indices_of_a_matrix_or_a_cube(lib, rng, columns, shuffled):
    shape = (50, 4, 3)[:columns]
    indices = np.argwhere(rng.random(shape) < 0.4)
    if shuffled:
        rng.shuffle(indices)
    keys, weights = np.arange(len(indices)), rng.normal(size=len(indices)).astype(np.float32)
    row = indices[:, 0] if columns == 2 else indices[:, 0] * 4 + indices[:, 1]
    splits, order = sparse_to_csr(row, 200)
    for wants_order in (False, True):
        got = lib.sok_sparse_to_csr(indices, keys, weights, 200, slot_num=4, wants_order=wants_order)
        assert_same(got.row_splits, splits)
        assert_same(got.csr_keys, keys[order])
        assert_same(got.csr_weights, weights[order])
        assert_same(got.order, order if wants_order else order[:0])


@pytest.mark.parametrize("index", [[0, 4, 0], [0, -1, 0], [-1, 0, 0], [50, 0, 0], [2**62, 3, 0]])
def test_an_index_outside_of_a_cube_is_reported(lib, index):
    got = lib.sok_sparse_to_csr([[0, 0, 0], index], [7, 8], np.zeros(0, np.float32), 200, slot_num=4)
    outside = lib.sok_sparse_to_csr([0, -1], [7, 8], np.zeros(0, np.float32), 200)
    assert_same(got.row_splits, outside.row_splits)


def test_large_input_agrees_with_a_stable_sort(lib, call, rng):
    row = rng.integers(0, 3_000, 50_000)
    keys, weights = rng.integers(0, 99, 50_000), rng.normal(size=50_000).astype(np.float32)
    order = np.argsort(row, kind="stable")
    splits, csr_keys, csr_weights, got_order = call(
        lambda *args: tuple(lib.sok_sparse_to_csr(*args)), tf.constant(row), keys, weights, tf.constant(3_000, tf.int64)
    )
    assert_same(splits, np.searchsorted(row[order], np.arange(3_001)))
    assert_same(csr_keys, keys[order])
    assert_same(csr_weights, weights[order])
    assert_same(got_order, order)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_order_is_a_permutation_that_sorts(row):
    row = np.array(row, np.int64)
    got = _ops.lib().sok_sparse_to_csr(row, np.arange(len(row)), np.zeros(0, np.float32), 6)
    order = got.order.numpy()
    assert sorted(order.tolist()) == list(range(len(row)))
    assert np.all(np.diff(row[order]) >= 0)
    assert_same(np.diff(got.row_splits), np.bincount(row, minlength=6))


@pytest.mark.parametrize("row", [[0, 1, 1, 3], [3, 1, 0, 1], []])
def test_gradient_goes_back_to_where_each_weight_came_from(lib, call, rng, row):
    upstream = rng.normal(size=len(row)).astype(np.float32)

    def gradient(weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            got = lib.sok_sparse_to_csr(np.array(row, np.int64), np.arange(len(row)), weights, 4)
            loss = tf.reduce_sum(got.csr_weights * upstream)
        return tape.gradient(loss, weights)

    order = sparse_to_csr(np.array(row), 4)[1]
    expected = np.zeros(len(row), np.float32)
    expected[order] = upstream
    assert_same(call(gradient, tf.zeros(len(row))), expected)


def test_gradient_without_weights_is_empty(lib):
    weights = tf.zeros(0)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        got = lib.sok_sparse_to_csr([1, 0], [7, 8], weights, 2)
        loss = tf.reduce_sum(got.csr_weights)
    assert tape.gradient(loss, weights).shape == [0]


def test_shapes_are_inferred(lib):
    with tf.Graph().as_default():
        p = tf.compat.v1.placeholder
        got = lib.sok_sparse_to_csr(p(tf.int64, [6]), p(tf.int32, [6]), p(tf.float32, [0]), 3)
        assert got.row_splits.shape == [4] and got.csr_keys.shape == got.order.shape == [6]
        assert got.csr_weights.shape == [0] and got.csr_keys.dtype == tf.int32
        got = lib.sok_sparse_to_csr(p(tf.int64, [None]), p(tf.int32, [None]), p(tf.float32, [None]), p(tf.int64, []))
        assert got.row_splits.shape.as_list() == [None]
        for shape in ([6, 1], [6, 4], [6, 2, 2]):
            with pytest.raises(ValueError, match="rank 1, or 2 or 3 columns"):
                lib.sok_sparse_to_csr(p(tf.int64, shape), p(tf.int32, [6]), p(tf.float32, [0]), 3)
        got = lib.sok_sparse_to_csr(
            p(tf.int64, [6, 3]), p(tf.int32, [6]), p(tf.float32, [0]), 3, slot_num=3, wants_order=False
        )
        assert got.csr_keys.shape == [6] and got.order.shape == [0]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (([0, 1], [1, 2, 3], [], 3), r"`keys` must have shape \[2\]. Received: \[3\]"),
        (([0, 1], [1, 2], [1.0], 3), r"`weights` .*per key \(2\).*: 1"),
        (([[0], [1]], [1, 2], [], 3), "`row` must have rank 1, or 2 or 3 columns"),
        (([[[0, 1]]], [1], [], 3), "`row` must have rank 1, or 2 or 3 columns"),
    ],
)
def test_bad_arguments_are_named(lib, args, text):
    row, keys, weights, num_rows = args
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        lib.sok_sparse_to_csr(row, np.array(keys, np.int64), np.array(weights, np.float32), num_rows)


@pytest.mark.parametrize("num_rows", [-1, -(2**63), 2**31, 2**45, 2**62, 2**63 - 1])
def test_a_number_of_rows_that_makes_no_sense_is_reported_in_place_of_splits(lib, call, num_rows):
    def build(num_rows):
        got = lib.sok_sparse_to_csr([0], np.array([1]), np.zeros(0, np.float32), num_rows)
        return got.row_splits, got.csr_keys

    for make in (lambda: build(tf.constant(num_rows, tf.int64)), lambda: call(build, tf.constant(num_rows, tf.int64))):
        splits, keys = make()
        assert_same(splits, report(11, num_rows))
        assert len(keys) == 0
    splits, _ = tf.function(lambda: build(tf.constant(num_rows, tf.int64)))()  # known when it is traced
    assert_same(splits, report(11, num_rows))


@pytest.mark.parametrize(("row", "which"), [([0, 3], 1), ([-1, 0], 0), ([0, 1, 2, 9], 3)])
def test_a_row_out_of_range_is_reported_in_place_of_splits(lib, row, which):
    # Raising here would leave the other ranks waiting: the op that reads the report raises.
    splits, keys, weights, order = lib.sok_sparse_to_csr(row, np.arange(len(row)), np.zeros(0, np.float32), 3)
    assert_same(splits, report(5, which))
    assert len(keys) == len(weights) == len(order) == 0
