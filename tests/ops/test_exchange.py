"""Routing, serving and gathering over R ranks that live in one process; NumPy moves the messages."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok import _ops
from tests.ops.shapes import SHAPES, make_keys
from tests.ops.tables import KEY_TYPES, NativeTable
from tests.reference.csr import first_fault
from tests.reference.judge import assert_close, assert_same
from tests.reference.keys import KEY_DTYPES, extreme_keys
from tests.reference.partition import HEADER_WORDS, all_to_all, owner, route, words

NOT_GROUPED = np.zeros(0, np.int64)


def word_type(key_dtype: tf.DType) -> tf.DType:
    return tf.int64 if key_dtype.size == 8 else tf.int32


class World:
    """R shards of one table, and the lookup of sok.lookup without its collectives."""

    def __init__(self, world_size, key_dtype=tf.int64, dim=3, capacity=1 << 20, hashed=True):
        self.size, self.dim, self.key_dtype = world_size, dim, key_dtype
        self.shards = [
            NativeTable(dim=dim, capacity=capacity, key_dtype=key_dtype, hashed=hashed, world_size=world_size, rank=r)
            for r in range(world_size)
        ]

    def route(self, rank, keys, row_splits=NOT_GROUPED, **limits):
        shard = self.shards[rank]
        return _ops.lib().sok_route_keys(
            shard.handle, shard.keys(keys), row_splits, Tword=word_type(self.key_dtype), **limits
        )

    def serve(self, rank, message, splits, insert=True, **limits):
        return _ops.lib().sok_serve_keys(self.shards[rank].handle, message, splits, insert, dim=self.dim, **limits)

    def lookup(self, keys_of_rank, insert=True, splits_of_rank=None, **limits):
        """Rows [N, D] of each rank's keys."""
        groups = splits_of_rank or [NOT_GROUPED] * self.size
        routed = [self.route(r, keys_of_rank[r], groups[r], **limits) for r in range(self.size)]
        received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
        served = [self.serve(r, *message, insert, **limits) for r, message in enumerate(zip(*received, strict=True))]
        home = all_to_all([t.rows.numpy() for t in served], [t.row_splits.numpy() for t in served])
        lib = _ops.lib()
        return [
            lib.sok_gather_rows(lib.sok_check_served(shard.handle, rows, splits), routed[r].index).numpy()
            for r, (shard, rows, splits) in enumerate(zip(self.shards, *home, strict=True))
        ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_keys_are_routed_as_numpy_routes_them(rng, shape, key_dtype, world_size):
    world = World(world_size, key_dtype)
    keys = make_keys(shape, key_dtype.as_numpy_dtype, rng)
    if shape == "split_over_threads":
        keys = keys % 300  # the judge is quadratic in distinct keys
    to_owner, index = route(keys, world_size)
    for rank in range(world_size):
        got = world.route(rank, keys)
        assert got.words.dtype == word_type(key_dtype)
        assert_same(got.words, words(to_owner, 8 * key_dtype.size))
        assert_same(got.splits, [HEADER_WORDS + len(mine) for mine in to_owner])
        assert_same(got.index, index)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_every_key_has_one_owner_at_any_world_size(dtype):
    keys = extreme_keys(dtype)
    for world_size in (1, 2, 3, 7, 64):
        shards = [
            NativeTable(dim=1, key_dtype=tf.as_dtype(dtype), world_size=world_size, rank=r) for r in range(world_size)
        ]
        for shard in shards:
            shard.assign(keys, np.zeros((len(keys), 1)))
        held = [set(shard.as_dict()) for shard in shards]
        assert sum(map(len, held)) == len(keys)
        for key in map(int, keys):
            assert key in held[owner(key, world_size)]


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_world_gives_what_one_rank_gives(rng, key_dtype, world_size, hashed):
    world = World(world_size, key_dtype, hashed=hashed)
    one = NativeTable(key_dtype=key_dtype, hashed=hashed)
    dtype = key_dtype.as_numpy_dtype
    extreme = extreme_keys(dtype) if hashed else np.array([0, 1, 2**20 - 1], dtype)
    for step in range(3):
        # Uneven batches, one rank without keys, all keys of one owner in the last step.
        keys = [
            rng.permutation(np.concatenate([extreme, rng.integers(0, 40, 10 * r, dtype)])) for r in range(world_size)
        ]
        keys[step % world_size] = keys[0][:0]
        if step == 2:
            keys = [k[k % dtype(world_size) == 0] for k in keys]
        for got, mine in zip(world.lookup(keys), keys, strict=True):
            assert_same(got, one.lookup(mine)[0])
    together = {key: row for shard in world.shards for key, row in shard.as_dict().items()}
    assert together == one.as_dict()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-20, 20), max_size=15), min_size=1, max_size=4), st.booleans())
def test_route_serve_and_gather_give_every_rank_its_rows(keys_of_rank, insert):
    world, one = World(len(keys_of_rank)), NativeTable()
    for got, keys in zip(world.lookup(keys_of_rank, insert), keys_of_rank, strict=True):
        assert_same(got, one.lookup(keys)[0])
    distinct = {k for keys in keys_of_rank for k in keys}
    assert sum(shard.size() for shard in world.shards) == (len(distinct) if insert else 0)


def test_header_rows_have_row_id_minus_one(rng):
    world = World(2)
    routed = world.route(0, [4, 5, 6, 8])
    assert_same(routed.words, [0, 0, 4, 6, 8, 0, 0, 5])
    served = world.serve(0, np.array([0, 0, 4, 6, 8, 0, 0]), np.array([5, 2], np.int32))
    assert_same(served.row_ids, [-1, 0, 1, 2, -1])
    assert_same(served.row_splits, [4, 1])
    assert_same(served.rows.numpy()[[0, 4]], np.zeros((2, 3)))
    unseen = world.serve(0, np.array([0, 0, 4, 10, 0, 0]), np.array([4, 2], np.int32), insert=False)
    assert_same(unseen.row_ids, [-1, 0, -1, -1])


def test_gradients_go_back_to_the_rows_of_their_owners(lib, call, rng):
    world = World(2, dim=2)
    message, splits = np.array([0, 0, 4, 6, 0, 0, 6]), np.array([4, 3], np.int32)
    upstream = rng.normal(size=(5, 2)).astype(np.float32)
    handle = world.shards[0].handle

    def step(message):
        with tf.GradientTape() as tape:
            tape.watch(handle)
            loss = tf.reduce_sum(world.serve(0, message, splits).rows * upstream)
        grad = tape.gradient(loss, handle)
        assert grad.dense_shape is None
        return grad.values, grad.indices

    values, indices = call(step, tf.constant(message))
    assert_same(indices, [-1, 0, 1, -1, 1])
    assert_same(values, upstream)
    # A whole way home: index and header rows, seen from the asking side.
    rows = tf.constant(rng.normal(size=(5, 2)), tf.float32)
    rows = tf.tensor_scatter_nd_update(rows, [[0], [3]], tf.zeros([2, 2]))

    def home(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            checked = lib.sok_check_served(handle, rows, [3, 2])
            loss = tf.reduce_sum(lib.sok_gather_rows(checked, [4, 1, 4]) * upstream[:3])
        return tape.gradient(loss, rows)

    expected = np.zeros((5, 2), np.float32)
    np.add.at(expected, [4, 1, 4], upstream[:3])
    assert_close(call(home, rows), expected)


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_key_outside_raises_the_same_on_every_rank(key_dtype, world_size):
    world = World(world_size, key_dtype, capacity=4, hashed=False)
    bad = [4 * world_size, int(key_dtype.max)] + ([] if key_dtype.is_unsigned else [-1, int(key_dtype.min)])
    for key in bad:
        routed = [world.route(r, [1, key] if r == 1 else [1]) for r in range(world_size)]
        assert_same(routed[1].splits, [HEADER_WORDS] * world_size)  # no keys are sent
        assert_same(routed[1].index, [0, 0])
        received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
        for rank, (message, splits) in enumerate(zip(*received, strict=True)):
            with pytest.raises(tf.errors.InvalidArgumentError) as error:
                world.serve(rank, message, splits)
            for text in (
                "input of rank 1",
                f"key {key} is outside [0, {4 * world_size})",
                f"rank {rank} of {world_size}",
            ):
                assert text in error.value.message
    assert all(shard.size() == 0 for shard in world.shards)


LIMITS = [
    ([0, 2, 2, 3, 7], {"slot_num": 2, "max_nnz": 3}, "sample 1, feature 1 has more than max_nnz = 3 keys"),
    ([0, 4, 4, 4, 7], {"slot_num": 2, "max_nnz": 3, "max_feature_num": 3}, "sample 0, feature 0 has more than max_nnz"),
    ([0, 2, 4, 5, 7], {"slot_num": 2, "max_feature_num": 3}, "sample 0 has more than max_feature_num = 3 keys"),
    ([0, 1, 2, 5, 7], {"slot_num": 2, "max_feature_num": 4}, "sample 1 has more than max_feature_num = 4 keys"),
    ([0, 2, 2, 3, 7], {"slot_num": 2, "max_nnz": 4, "max_feature_num": 5}, None),
    ([0, 0, 0, 0, 7], {"slot_num": 4}, None),
]


@pytest.mark.parametrize(("row_splits", "limits", "text"), LIMITS)
def test_too_many_keys_raise_at_once_with_one_rank(lib, call, row_splits, limits, text):
    assert (first_fault(np.array(row_splits), **({"max_nnz": 0, "max_feature_num": 0} | limits)) is None) == (
        text is None
    )
    table, keys = NativeTable(name="shop"), tf.range(7, dtype=tf.int64)
    check = lambda keys: lib.sok_validate_csr(table.handle, keys, tf.constant(row_splits, tf.int64), **limits)  # noqa: E731
    if text is None:
        assert_same(call(check, keys), keys)
    else:
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            call(check, keys)
        assert text in error.value.message and "table 'shop' (rank 0 of 1)" in error.value.message
        assert "input of rank" not in error.value.message  # with one rank there is nobody else to blame
    assert table.size() == 0


@pytest.mark.parametrize(("row_splits", "limits", "text"), LIMITS)
@pytest.mark.parametrize("key_dtype", [tf.int64, tf.uint32])
def test_too_many_keys_raise_on_every_rank(row_splits, limits, text, key_dtype):
    world = World(2, key_dtype)
    keys = [[1, 2, 3], list(range(7))]
    splits = [np.array([0, 1, 2, 3, 3]), np.array(row_splits)]
    if text is None:
        for got, mine in zip(world.lookup(keys, True, splits, **limits), keys, strict=True):
            assert_same(got, NativeTable(key_dtype=key_dtype).lookup(mine)[0])
        return
    routed = [world.route(r, keys[r], splits[r], **limits) for r in range(2)]
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    for rank, message in enumerate(zip(*received, strict=True)):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            world.serve(rank, *message, **limits)
        assert text in error.value.message and "input of rank 1: " in error.value.message
    assert all(shard.size() == 0 for shard in world.shards)


def test_a_full_shard_is_reported_to_every_rank(lib):
    world = World(2, capacity=2)
    world.lookup([[1, 2], [4]])
    before = [shard.as_dict() for shard in world.shards]
    # Rank 1 stores the odd keys and has one place left; rank 0 is full and gets only keys that it has.
    keys = [[2, 3], [5, 4]]
    routed = [world.route(r, keys[r]) for r in range(2)]
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    served = [world.serve(r, *message) for r, message in enumerate(zip(*received, strict=True))]
    assert_same(served[1].row_ids, [-1] * 4)
    home = all_to_all([t.rows.numpy() for t in served], [t.row_splits.numpy() for t in served])
    for rank, (rows, splits) in enumerate(zip(*home, strict=True)):
        with pytest.raises(tf.errors.ResourceExhaustedError) as error:
            lib.sok_check_served(world.shards[rank].handle, rows, splits)
        for text in (f"table 'item' (rank {rank} of 2)", "the shard of rank 1 is full", "all 2 rows"):
            assert text in error.value.message
    assert [shard.as_dict() for shard in world.shards] == before


def test_shapes_are_inferred(lib):
    with tf.Graph().as_default():
        p = tf.compat.v1.placeholder
        handle, keys, splits = p(tf.resource, []), p(tf.int32, [5]), p(tf.int64, [None])
        routed = lib.sok_route_keys(handle, keys, splits, Tword=tf.int32)
        assert routed.words.shape.as_list() == [None] and routed.index.shape == [5]
        assert routed.splits.shape.as_list() == [None] and routed.words.dtype == tf.int32
        served = lib.sok_serve_keys(handle, p(tf.int64, [None]), p(tf.int32, [3]), True, dim=7)
        assert served.rows.shape.as_list() == [None, 7] and served.row_ids.shape.as_list() == [None]
        assert served.row_splits.shape == [3]
        assert lib.sok_check_served(handle, p(tf.float32, [None, 7]), p(tf.int32, [3])).shape.as_list() == [None, 7]
        assert lib.sok_validate_csr(handle, keys, splits).shape == [5]
        with pytest.raises(ValueError, match="rank 1"):
            lib.sok_route_keys(handle, p(tf.int32, [5, 1]), splits, Tword=tf.int32)


def test_wrong_arguments_are_named(lib):
    world = World(2)
    shard, none = world.shards[0].handle, NOT_GROUPED
    rows = np.zeros((3, 3), np.float32)
    i32 = lambda *x: np.array(x, np.int32)  # noqa: E731
    cases = [
        (lambda: lib.sok_route_keys(shard, np.zeros(2, np.int64), none, Tword=tf.int32), "`Tword` must be int64 for"),
        (lambda: lib.sok_route_keys(shard, np.zeros(2, np.int32), none, Tword=tf.int32), "keys must be int64"),
        (lambda: world.route(0, [[1]]), "`keys` must have rank 1"),
        (lambda: world.serve(0, i32(0, 0, 0, 0), i32(2, 2)), "`words` must be int64 for 64-bit keys"),
        (lambda: world.serve(0, np.zeros(4, np.int64), i32(4)), r"`splits` must have shape \[2\]. Received: \[1\]"),
        (lambda: world.serve(0, np.zeros(4, np.int64), i32(3, 1)), "message of rank 1 has no header"),
        (lambda: world.serve(0, np.zeros(4, np.int64), i32(3, 2)), "`splits` must sum to the number of words, 4"),
        (lambda: world.serve(0, np.array([99, 0, 0, 0]), i32(2, 2)), "unknown status 99"),
        (lambda: world.serve(0, np.array([0, 0, 3, 0, 0]), i32(3, 2)), "key 3 belongs to rank 1"),
        (lambda: lib.sok_serve_keys(shard, np.zeros(4, np.int64), i32(2, 2), True, dim=4), "rows have dim 3"),
        (lambda: lib.sok_check_served(shard, rows, i32(3)), r"`splits` must have shape \[2\]"),
        (lambda: lib.sok_check_served(shard, rows, i32(3, 1)), "`splits` does not fit `rows`"),
        (lambda: lib.sok_check_served(shard, rows, i32(3, 0)), "`splits` does not fit `rows`"),
        (lambda: lib.sok_check_served(shard, rows[:, :2], i32(2, 1)), "rows have dim 3. Received: 2"),
        (lambda: lib.sok_validate_csr(shard, np.zeros((1, 1), np.int64), none), "`keys` must have rank 1"),
        (lambda: lib.sok_validate_csr(shard, np.zeros(1, np.int64), np.array([1])), "`row_splits` must start with 0"),
    ]
    for case, text in cases:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            case()
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="slot_num"):
        lib.sok_validate_csr(shard, np.zeros(1, np.int64), none, slot_num=0)


def test_no_memory_of_an_owner_is_reported(lib):
    world = World(2)
    rows = np.zeros((2, 3), np.float32)
    rows[1, 0] = 2.0  # the header row of rank 1 says: no memory
    with pytest.raises(tf.errors.ResourceExhaustedError, match="rank 1 has no memory for new rows"):
        lib.sok_check_served(world.shards[0].handle, rows, np.array([1, 1], np.int32))


REPORTS = [
    (np.array([-5, 3]), "the row index of key number 3 is outside the dense_shape"),
    (np.array([-6, 5]), "the number of rows must be batch * slot_num, a multiple of 2. Received: 5"),
    (np.array([-7, 3]), "every sample must have slot_num = 2 features. Received: 3"),
    (np.array([-8, 0]), "the same number of ids"),
    (np.array([0, 2]), "`row_splits` must start with 0, never fall, and end with the number of keys"),
]


@pytest.mark.parametrize(("row_splits", "text"), REPORTS)
def test_a_malformed_input_raises_on_every_rank(row_splits, text):
    world = World(2)
    routed = [world.route(0, [1, 2], slot_num=2), world.route(1, [3], row_splits, slot_num=2)]
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    for rank, message in enumerate(zip(*received, strict=True)):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            world.serve(rank, *message, slot_num=2)
        assert text in error.value.message and "input of rank 1: " in error.value.message
    assert all(shard.size() == 0 for shard in world.shards)


@pytest.mark.parametrize(("row_splits", "text"), REPORTS[:4])
def test_a_report_raises_at_once_with_one_rank(lib, row_splits, text):
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        lib.sok_validate_csr(NativeTable(name="shop").handle, np.zeros(1, np.int64), row_splits, slot_num=2)
    assert text in error.value.message and "table 'shop'" in error.value.message


@pytest.mark.parametrize("problem", ["rows_not_whole", "wrong_slot_num", "uneven", "weights_differ"])
def test_check_input_passes_splits_or_reports(lib, problem):
    splits = tf.constant([0, 1, 4], tf.int64)
    assert_same(lib.sok_check_input(splits, True, 9, problem=problem), splits)
    report = lib.sok_check_input(splits, False, 9, problem=problem)
    assert_same(report, [{"rows_not_whole": -6, "wrong_slot_num": -7, "uneven": -8, "weights_differ": -9}[problem], 9])
    # An earlier report is not written over.
    assert_same(lib.sok_check_input(tf.constant([-5, 2], tf.int64), False, 9, problem=problem), [-5, 2])
