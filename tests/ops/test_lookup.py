import gc

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.shapes import SHAPES, make_keys
from tests.ops.tables import KEY_TYPES, NativeTable, fresh_rows
from tests.reference import combine
from tests.reference.initial_values import Initializer
from tests.reference.judge import assert_close, assert_same
from tests.reference.keys import extreme_keys

SMALL_SHAPES = [shape for shape in SHAPES if shape != "split_over_threads"]


@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.parametrize("key_dtype", KEY_TYPES)
def test_new_keys_get_their_initial_rows_and_keep_them(rng, call, shape, key_dtype):
    table = NativeTable(dim=5, key_dtype=key_dtype)
    keys = make_keys(shape, key_dtype.as_numpy_dtype, rng)
    expected = table.expected.lookup(keys, insert=True)
    rows, row_ids = call(lambda keys: tuple(table.lookup(keys)), tf.constant(keys))
    assert_same(rows, expected)
    again, again_ids = table.lookup(keys, insert=False)
    assert_same(again, expected)
    assert_same(again_ids, row_ids)
    # New keys are numbered in order of first appearance, so a key's duplicates share its row id.
    distinct = list(table.expected.rows)
    assert_same(row_ids, np.array([distinct.index(int(k)) for k in keys], np.int64))
    assert table.size() == len(distinct)


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
def test_extreme_keys_are_told_apart(key_dtype):
    table = NativeTable(dim=1, key_dtype=key_dtype)
    keys = extreme_keys(key_dtype.as_numpy_dtype)
    values = np.arange(len(keys), dtype=np.float32)[:, None]
    table.assign(keys, values)
    assert_same(table.lookup(keys, insert=False)[0], values)
    assert table.size() == len(keys)
    assert table.as_dict() == {int(k): (float(i),) for i, k in enumerate(keys)}


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
def test_missing_keys_read_as_initial_rows_and_are_not_stored(key_dtype):
    table = NativeTable(key_dtype=key_dtype)
    keys = extreme_keys(key_dtype.as_numpy_dtype)
    table.lookup(keys[:2])
    rows, row_ids = table.lookup(keys, insert=False)
    assert_same(rows, table.expected.lookup(keys, insert=False))
    assert_same(row_ids, [0, 1] + [-1] * (len(keys) - 2))
    assert table.size() == 2


@pytest.mark.parametrize("insert", [False, True])
def test_a_lookup_split_over_threads_gives_every_key_its_row(call, rng, insert):
    table = NativeTable(dim=4, capacity=20_000)
    keys = tf.constant(make_keys("split_over_threads", np.int64, rng))
    distinct, inverse = (t.numpy() for t in tf.unique(keys))
    fresh = fresh_rows(distinct, table.expected.seed, table.expected.init, 4)
    for _ in range(2):  # once all new, once all known
        rows, row_ids = call(lambda keys: tuple(table.lookup(keys, insert)), keys)
        assert_same(rows, fresh[inverse])
        assert_same(row_ids, inverse if insert else np.full(len(keys), -1))
    assert table.size() == (len(distinct) if insert else 0)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 0), (2, 1, 3)])
def test_rows_take_the_shape_of_keys(call, rng, shape):
    table = NativeTable(dim=2)
    keys = rng.integers(0, 5, shape)
    rows, row_ids = call(lambda keys: tuple(table.lookup(keys)), tf.constant(keys))
    assert rows.shape == (*shape, 2) and row_ids.shape == shape
    assert_same(tf.reshape(rows, [-1, 2]), table.expected.lookup(keys.reshape(-1), insert=True))


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 16, 17, 64])
def test_rows_of_any_dim(rng, dim):
    table = NativeTable(dim=dim)
    keys = make_keys("skewed", np.int64, rng)[:50]
    assert_same(table.lookup(keys)[0], table.expected.lookup(keys, insert=True))
    table.assign(keys[:1], np.full((1, dim), 3.0))
    assert_same(table.lookup(keys[:1])[0], np.full((1, dim), 3.0))


@pytest.mark.parametrize("combiner", combine.COMBINERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("insert", [False, True])
@pytest.mark.parametrize(("n", "segments"), [(0, 0), (0, 3), (1, 1), (40, 15), (3_000, 900)])
def test_pooled_lookup_agrees_with_numpy(rng, call, combiner, weighted, insert, n, segments):
    table = NativeTable(dim=4, init=Initializer("uniform", 0.5, 1.5))
    keys = rng.zipf(1.5, n) % 60 - 5
    known = np.arange(0, 60, 2)
    table.lookup(known)
    table.expected.lookup(known, insert=True)
    splits = np.concatenate([[0], np.sort(rng.integers(0, n + 1, max(segments - 1, 0))), [n][: min(segments, 1)]])
    weights = rng.uniform(0.5, 1.5, n if weighted else 0).astype(np.float32)
    output, row_ids = call(
        lambda keys: tuple(table.lookup_combine(keys, splits, weights, combiner, insert)), tf.constant(keys)
    )
    assert_close(output, table.expected.lookup_combine(keys, splits, weights, combiner, insert))
    assert_same(row_ids, table.lookup(keys, insert=False)[1])
    assert table.size() == len(table.expected.rows)


def test_gradient_is_indexed_slices_of_row_ids(call, rng):
    table = NativeTable(dim=3)
    keys = tf.constant([[7, 9], [7, -4]], tf.int64)
    upstream = rng.normal(size=(2, 2, 3)).astype(np.float32)

    def step(keys):
        with tf.GradientTape() as tape:
            tape.watch(table.handle)
            loss = tf.reduce_sum(table.lookup(keys)[0] * upstream)
        grad = tape.gradient(loss, table.handle)
        assert isinstance(grad, tf.IndexedSlices) and grad.dense_shape is None
        return grad.values, grad.indices

    table.lookup([5])  # row 0
    values, indices = call(step, keys)
    assert_same(values, upstream.reshape(4, 3))
    assert_same(indices, [1, 2, 1, 3])


@pytest.mark.parametrize("combiner", combine.COMBINERS)
def test_pooled_gradient_is_summed_per_row(call, rng, combiner):
    table = NativeTable(dim=3)
    keys, splits = tf.constant([7, 9, 7, -4, 7], tf.int64), np.array([0, 3, 3, 5])
    weights = rng.uniform(0.5, 1.5, 5).astype(np.float32)
    upstream = rng.normal(size=(3, 3)).astype(np.float32)

    def step(keys):
        with tf.GradientTape() as tape:
            tape.watch(table.handle)
            loss = tf.reduce_sum(table.lookup_combine(keys, splits, weights, combiner)[0] * upstream)
        grad = tape.gradient(loss, table.handle)
        return grad.values, grad.indices

    values, indices = call(step, keys)
    assert_same(indices, [0, 1, 2])
    index = np.array([0, 1, 0, 2, 0])
    assert_close(values, combine.combine_grad_rows(upstream, index, splits, weights, 3, combiner), scale=1)


def test_gradient_of_unseen_keys_has_row_id_minus_one():
    table = NativeTable(dim=1)
    table.lookup([3])
    with tf.GradientTape() as tape:
        tape.watch(table.handle)
        loss = tf.reduce_sum(table.lookup([3, 4], insert=False)[0])
    assert_same(tape.gradient(loss, table.handle).indices, [0, -1])


def test_shapes_are_inferred(lib):
    with tf.Graph().as_default():
        p = tf.compat.v1.placeholder
        handle = p(tf.resource, [])
        rows, row_ids = lib.sok_table_lookup(handle, p(tf.int64, [None, 4]), True, dim=8)
        assert rows.shape.as_list() == [None, 4, 8] and row_ids.shape.as_list() == [None, 4]
        rows, row_ids = lib.sok_table_lookup(handle, p(tf.int64, None), True, dim=8)
        assert rows.shape.rank is None and row_ids.shape.rank is None
        group = {"table_of": [0, 0], "dims": [8], "combiners": ["mean", "sum"]}
        splits, weights = [p(tf.int64, [5]), p(tf.int64, [None])], [p(tf.float32, [0]), p(tf.float32, [None])]
        outputs, row_ids = lib.sok_group_lookup(
            [handle], [p(tf.uint64, [9]), p(tf.uint64, [None])], splits, weights, True, **group
        )
        assert outputs[0].shape == [4, 8] and row_ids[0].shape == [9]
        assert outputs[1].shape.as_list() == [None, 8] and row_ids[1].shape.as_list() == [None]
        with pytest.raises(ValueError, match="rank 1"):
            lib.sok_group_lookup([handle], [p(tf.int64, [9, 1]), p(tf.int64, [9])], splits, weights, True, **group)
        with pytest.raises(ValueError, match="rank 0"):
            lib.sok_table_lookup(handle, p(tf.int64, [2]), [True], dim=8)


def test_a_full_table_takes_no_key_of_the_batch(call):
    table = NativeTable(dim=2, capacity=3, name="clicks")
    table.lookup([1, 2])
    before = table.as_dict()
    for keys in ([3, 1, 3, 4], [3, 4, 5, 6, 7]):
        with pytest.raises(tf.errors.ResourceExhaustedError) as error:
            call(lambda keys: table.lookup(keys)[0], tf.constant(keys, tf.int64))
        for text in ("table 'clicks' (rank 0 of 1)", "all 3 rows", "key ", "max_vocabulary_size_per_gpu"):
            assert text in error.value.message
        with pytest.raises(tf.errors.ResourceExhaustedError):
            call(lambda keys: table.lookup_combine(keys, [0, len(keys)])[0], tf.constant(keys, tf.int64))
        assert table.as_dict() == before and table.size() == 2
    # The last place is still there, also for a key that occurs twice.
    assert_same(table.lookup([3, 3])[1], [2, 2])
    assert_same(table.lookup([3, 2, 1])[1], [2, 1, 0])
    assert_same(table.lookup([9], insert=False)[1], [-1])


def test_a_full_table_keeps_rows_of_erased_keys_free():
    table = NativeTable(dim=1, capacity=3)
    table.lookup([1, 2, 3])
    table.erase([1, 3])
    with pytest.raises(tf.errors.ResourceExhaustedError):
        table.lookup([4, 5, 6])
    assert table.size() == 1
    assert sorted(table.lookup([4, 5])[1].numpy() % 2**32) == [0, 2]  # the upper half counts erasures
    with pytest.raises(tf.errors.ResourceExhaustedError, match="all 3 rows"):
        table.lookup([7])


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
def test_identity_table_uses_keys_as_row_numbers(key_dtype):
    table = NativeTable(dim=2, capacity=4, key_dtype=key_dtype, hashed=False)
    rows, row_ids = table.lookup([3, 0, 3])
    assert_same(row_ids, [3, 0, 3])
    assert_same(rows, table.expected.lookup(np.array([3, 0, 3]), insert=True))
    assert_same(table.lookup([1, 0], insert=False)[1], [-1, 0])
    assert table.size() == 2 and set(table.as_dict()) == {0, 3}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_identity_table_of_several_ranks_divides(rank):
    table = NativeTable(dim=1, capacity=2, hashed=False, world_size=3, rank=rank)
    assert_same(table.lookup([3 + rank, rank])[1], [1, 0])
    assert set(table.as_dict()) == {rank, 3 + rank}


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
def test_identity_table_refuses_keys_outside(key_dtype):
    table = NativeTable(capacity=4, key_dtype=key_dtype, hashed=False, name="shop")
    outside = [4, 2**31, int(key_dtype.max)] + ([] if key_dtype.is_unsigned else [-1, int(key_dtype.min)])
    for key in outside:
        if not key_dtype.min <= key <= key_dtype.max:
            continue
        for call in (
            lambda keys: table.lookup(keys),
            lambda keys: table.lookup(keys, insert=False),
            lambda keys: table.lookup_combine(keys, [0, 2]),
            lambda keys: table.assign(keys, np.zeros((2, 3))),
            lambda keys: table.erase(keys),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError) as error:
                call([1, key])
            assert f"key {key} is outside [0, 4)" in error.value.message
            assert "table 'shop' (rank 0 of 1)" in error.value.message
    assert table.size() == 0


def test_keys_of_another_rank_are_refused(lib):
    table = NativeTable(world_size=3, rank=1, name="shop")
    for key, owner in ((3, 0), (5, 2), (-1, 2), (-3, 0)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=rf"\(rank 1 of 3\): key {key} belongs to rank {owner}"
        ):
            table.lookup([1, key])
    assert_same(table.lookup([1, -2, 4])[1], [0, 1, 2])


def test_wrong_arguments_are_named(lib):
    table = NativeTable(dim=3, name="shop")
    cases = [
        (lambda: table.lookup(tf.constant([1], tf.int32)), r"table 'shop'.*keys must be int64. Received: int32"),
        (lambda: lib.sok_table_lookup(table.handle, np.array([1]), True, dim=4), "rows have dim 3. Received: 4"),
        (lambda: lib.sok_table_lookup(table.handle, np.array([1]), [True], dim=3), "`insert` must have rank 0"),
        (lambda: table.lookup_combine([[1]], [0, 1]), "`keys` must have rank 1"),
        (lambda: table.lookup_combine([1, 2], [0, 1]), "`row_splits` must end with .*2"),
        (lambda: table.lookup_combine([1, 2], [0, 2], [1.0]), r"`weights` .*per key \(2\)"),
        (lambda: table.lookup_combine([1, 2], [[0, 2]]), "`row_splits` must have rank 1"),
    ]
    for case, text in cases:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            case()
    assert table.size() == 0


def test_a_handle_of_something_else_is_refused(lib):
    variable = tf.Variable([1.0])
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.NotFoundError)):
        lib.sok_table_lookup(variable.handle, np.array([1]), True, dim=3)


def test_an_error_in_a_function_leaves_the_table_usable(call):
    table = NativeTable(capacity=2, hashed=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"key 2 is outside \[0, 2\)"):
        call(lambda keys: table.lookup(keys)[0], tf.constant([2], tf.int64))
    assert_same(call(lambda keys: table.lookup(keys)[1], tf.constant([1], tf.int64)), [1])


def test_the_table_lives_as_long_as_a_function_that_uses_it():
    def trace():
        table = NativeTable(dim=1)
        table.assign([5], [[2.5]])
        return tf.function(lambda keys: table.lookup(keys)[0]).get_concrete_function(tf.TensorSpec([None], tf.int64))

    concrete = trace()
    gc.collect()
    assert_same(concrete(tf.constant([5], tf.int64)), [[2.5]])
