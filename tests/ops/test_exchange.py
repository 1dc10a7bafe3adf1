"""Routing and serving over R ranks that live in one process; NumPy moves the messages."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.messages import saying
from tests.ops.shapes import SHAPES, make_keys, report
from tests.ops.tables import KEY_TYPES, NativeTable
from tests.ops.worlds import FINE, FIRST, HEADER_WORDS, NO_WEIGHTS, NOT_GROUPED, ONE, World, i32, rows, word_type
from tests.reference.csr import first_fault
from tests.reference.exchange import ANSWER_HEADER, MAGIC, all_to_all, cut, message, owner, route
from tests.reference.judge import assert_same
from tests.reference.keys import KEY_DTYPES, extreme_keys

# Routing.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_keys_are_routed_as_numpy_routes_them(rng, shape, key_dtype, world_size):
    world = World(world_size, [key_dtype])
    keys = make_keys(shape, key_dtype.as_numpy_dtype, rng)
    if shape == "split_over_threads":
        keys = keys % 300  # the judge is quadratic in distinct keys
    asked, (places,), (first,) = route([(0, keys)], [3], world_size)
    messages = [message(of_owner, [[]], 8 * key_dtype.size, program=5, call=7) for of_owner in asked]
    for rank in range(world_size):
        got = world.route(rank, [rows(keys)], call=7, program=5)
        assert got.words.dtype == word_type(key_dtype)
        assert_same(got.words, np.concatenate(messages))
        assert_same(got.splits, [len(m) for m in messages])
        assert_same(got.asked, [ANSWER_HEADER + 3 * len(of_owner[0]) for of_owner in asked])
        assert_same(got.index[0], np.where(first, places.astype(np.int32) | FIRST, places))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tables_of_all_kinds_share_one_message(rng, world_size):
    dtypes, dims = [tf.int64, tf.uint32, tf.int32], [3, 1, 8]
    world = World(world_size, dtypes, dims)
    features = [
        (table, rng.integers(0, 30, n).astype(dtypes[table].as_numpy_dtype))
        for table, n in ((1, 40), (0, 50), (1, 30), (2, 0), (0, 1))
    ]
    asked, places, first = route(features, dims, world_size)
    got = world.route(0, [rows(keys, table) for table, keys in features], insert=False)
    assert_same(got.words, np.concatenate([message(of_owner, [[]] * 5, 64, insert=False) for of_owner in asked]))
    for index, place, is_first in zip(got.index, places, first, strict=True):
        assert_same(index, np.where(is_first, place.astype(np.int32) | FIRST, place))


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 50, 70_000])  # the last in several chunks
def test_pieces_are_routed_as_numpy_cuts_them(rng, key_dtype, world_size, n):
    world = World(world_size, [key_dtype], ways=["sums"])
    half = rng.integers(0, 2**31 - 1, n).astype(key_dtype.as_numpy_dtype)
    keys = half if n > 50 else np.concatenate([extreme_keys(key_dtype.as_numpy_dtype), half])
    few = np.array([9, 9, 4], keys.dtype)
    row_splits = np.sort(np.concatenate([[0, 0], rng.integers(0, len(keys), len(keys) // 4), [len(keys)] * 3]))
    got = world.route(0, [(0, keys, row_splits, None, "mean"), rows(few), (0, few, [0, 0, 2, 3], None, "sum")])
    pieces, of_few = cut(keys, row_splits, world_size), cut(few, [0, 0, 2, 3], world_size)
    asked, (_, places, _), _ = route([(0, keys[:0]), (0, few), (0, keys[:0])], [3], world_size)
    messages = [
        message(of_owner, [mine, [], of_mine], 8 * key_dtype.size)
        for of_owner, mine, of_mine in zip(asked, pieces, of_few, strict=True)
    ]
    assert_same(got.words, np.concatenate(messages))
    assert_same(got.splits, [len(m) for m in messages])
    floats = [ANSWER_HEADER + 3 * (len(a[0]) + len(m) + len(o)) for a, m, o in zip(asked, pieces, of_few, strict=True)]
    assert_same(got.asked, floats)
    # Where each rank's answers to the first feature begin, and which rank answers a key.
    begin = np.cumsum([0, *floats[:-1]]) + ANSWER_HEADER + [3 * len(a[0]) for a in asked]
    expected, splits, scales, seen = [], [0], [], [0] * world_size
    for first, last in itertools.pairwise(row_splits):
        for rank in dict.fromkeys(owner(key, world_size) for key in keys[first:last]):
            expected.append(begin[rank] + 3 * seen[rank])
            scales.append(np.float32(1) / np.float32(last - first))
            seen[rank] += 1
        splits.append(len(expected))
    assert_same(got.index[0], np.array(expected, np.int32) | FIRST)
    assert_same(got.splits_home[0], splits)
    assert_same(got.scales[0], np.array(scales, np.float32))
    assert got.scales[1].shape == got.scales[2].shape == [0]


def test_many_keys_of_one_table_are_cut_into_parts(rng):
    world = World(2, dims=[2])
    keys = rng.integers(-(10**6), 10**6, 400_000)  # more than one part holds
    got = world.route(0, [rows(keys[:250_000]), rows(keys[250_000:])])
    index = np.concatenate([i.numpy() for i in got.index])
    places = index & 0x7FFFFFFF
    words, ends = got.words.numpy(), np.cumsum(got.splits)
    key_at = {}
    place = 0
    for r, part in enumerate(np.split(words, ends[:-1])):
        place += ANSWER_HEADER
        assert part[HEADER_WORDS : HEADER_WORDS + 5].tolist() == [len(part) - HEADER_WORDS - 5, 0, 0, 0, 0]
        for key in part[HEADER_WORDS + 5 :]:
            assert key % 2 == r
            key_at[place] = key
            place += 2
    assert len(key_at) == len(np.unique(keys)) == (index < 0).sum()
    assert [key_at[p] for p in places] == keys.tolist()
    first = {}
    for i, p in enumerate(places):
        assert (index[i] < 0) == (p not in first)
        first.setdefault(p, i)


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


def test_row_ids_come_by_asking_rank(rng):
    world = World(2)
    served = world.serve(0, np.array([*FINE, 2, 0, 0, 4, 6, *FINE, 1, 0, 0, 6]), i32(12, 11))
    assert_same(served.row_ids[0], [0, 1, 1])
    assert_same(served.counts, [[2, 0, 0], [1, 0, 0]])
    assert_same(served.answer_splits, [ANSWER_HEADER + 6, ANSWER_HEADER + 3])
    answers = served.answers.numpy()
    assert_same(answers[:ANSWER_HEADER], np.zeros(ANSWER_HEADER))
    assert_same(answers[ANSWER_HEADER + 3 : ANSWER_HEADER + 6], answers[-3:])
    unseen = np.array([MAGIC, *[0] * 6, 2, 0, 0, 4, 10, MAGIC, *[0] * 6, 0, 0, 0])
    assert_same(world.serve(0, unseen, i32(12, 10), insert=False).row_ids[0], [0, -1])


# Bad news.


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_key_outside_raises_the_same_on_every_rank(key_dtype, world_size):
    world = World(world_size, [key_dtype], capacity=4, hashed=False)
    bad = [4 * world_size, int(key_dtype.max)] + ([] if key_dtype.is_unsigned else [-1, int(key_dtype.min)])
    for key in bad:
        routed = [world.route(r, [rows([1]), rows([1, key] if r == 1 else [1])]) for r in range(world_size)]
        assert_same(routed[1].splits, [HEADER_WORDS] * world_size)  # no keys are sent
        assert_same(routed[1].index[1], [0, 0])
        texts = ("input of rank 1", f"key {key} is outside [0, {4 * world_size})")
        world.raises_everywhere(routed, tf.errors.InvalidArgumentError, texts, [0, 0])


LIMITS = [
    ([0, 2, 2, 3, 7], {"slot_num": 2, "max_nnz": 3}, ("sample 1, feature 1", "max_nnz = 3")),
    ([0, 4, 4, 4, 7], {"slot_num": 2, "max_nnz": 3, "max_feature_num": 3}, ("sample 0, feature 0", "max_nnz")),
    ([0, 2, 4, 5, 7], {"slot_num": 2, "max_feature_num": 3}, ("sample 0", "max_feature_num = 3")),
    ([0, 1, 2, 5, 7], {"slot_num": 2, "max_feature_num": 4}, ("sample 1", "max_feature_num = 4")),
    ([0, 2, 2, 3, 7], {"slot_num": 2, "max_nnz": 4, "max_feature_num": 5}, None),
    ([0, 0, 0, 0, 7], {"slot_num": 4}, None),
]


@pytest.mark.parametrize(("row_splits", "limits", "parts"), LIMITS)
def test_too_many_keys_raise_at_once_with_one_rank(lib, call, row_splits, limits, parts):
    assert (first_fault(np.array(row_splits), **({"max_nnz": 0, "max_feature_num": 0} | limits)) is None) == (
        parts is None
    )
    table, keys = NativeTable(name="shop"), tf.range(7, dtype=tf.int64)
    check = lambda keys: lib.sok_validate_csr(table.handle, keys, tf.constant(row_splits, tf.int64), **limits)  # noqa: E731
    if parts is None:
        assert_same(call(check, keys), keys)
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=saying(*parts, "'shop' (rank 0 of 1)")) as error:
            call(check, keys)
        assert "input of rank" not in error.value.message  # with one rank there is nobody else to blame
    assert table.size() == 0


@pytest.mark.parametrize(("row_splits", "limits", "parts"), LIMITS)
@pytest.mark.parametrize("key_dtype", [tf.int64, tf.uint32])
def test_too_many_keys_raise_on_every_rank(row_splits, limits, parts, key_dtype):
    world = World(2, [key_dtype])
    features = [[(0, [1, 2, 3], [0, 1, 2, 3, 3], None, "sum")], [(0, range(7), row_splits, None, "sum")]]
    if parts is None:
        world.lookup(features, **limits)
        return
    routed = [world.route(r, features[r], **limits) for r in range(2)]
    world.raises_everywhere(routed, tf.errors.InvalidArgumentError, (*parts, "input of rank 1: "), **limits)


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ((0, [1, 2], [0, 3], None, "sum"), ["`row_splits`", "start with 0"]),
        ((0, [1, 2], [0, 2], [1.0, 2.0, 3.0], "sum"), ["`weights`", "(2)", "Received: 3"]),
        ((0, [1, 2], [0, 2], [[1.0, 2.0]], "sum"), ["`weights`", "rank 1"]),
        ((0, [[1, 2]], [0, 2], None, "sum"), ["`keys`", "rank 1"]),
        ((0, [1, 2], [[0, 2]], None, "sum"), ["`row_splits`", "rank 1"]),
        ((0, tf.constant([1, 2]), [0, 2], None, "sum"), ["int64", "Received: int32"]),
    ],
)
def test_malformed_input_raises_on_every_rank(bad, parts):
    world = World(3)
    routed = [world.route(r, [(0, [1], [0, 1], None, "sum"), bad if r == 2 else rows([4])]) for r in range(3)]
    world.raises_everywhere(routed, tf.errors.InvalidArgumentError, (*parts, "input of rank 2: "), [0, 0])


@pytest.mark.parametrize("wide", [True, False])
def test_a_refusal_is_told_in_its_own_words(lib, wide):
    world = World(2, [tf.int64 if wide else tf.int32])
    text = "ValueError: größer als gedacht"
    refused = lib.sok_exchange_refuse(
        5, True, Tword=tf.int64 if wide else tf.int32, program=3, world_size=2, text=text.encode()
    )
    routed = [world.route(0, [rows([1])], call=5, program=3), refused]
    texts = (text, "input of rank 1: ", "table 'item'")
    world.raises_everywhere(routed, tf.errors.InvalidArgumentError, texts, call=5, program=3)


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"call": 8}, ["different calls", "7, 8"]),
        ({"insert": False}, ["`training`", "same on all workers", "1, 0"]),
        ({"program": 4}, ["different tables"]),
    ],
)
def test_ranks_that_are_not_in_step_all_raise(other, parts):
    world = World(2)
    mine = {"call": 7, "program": 3, "insert": True}
    of_rank = [mine, mine | other]
    routed = [world.route(r, [rows([1, 2])], **of_rank[r]) for r in range(2)]
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    for rank, words in enumerate(zip(*received, strict=True)):
        said = saying(*parts, f"table 'item' (rank {rank} of 2)")
        with pytest.raises(tf.errors.FailedPreconditionError, match=said):
            world.serve(rank, *words, **of_rank[rank])
    assert all(shard.size() == 0 for (shard,) in world.shards)


def test_a_full_shard_is_reported_to_every_rank():
    world = World(2, capacity=2)
    world.rows([[1, 2], [4]])
    before = [shard.as_dict() for (shard,) in world.shards]
    # Rank 1 stores the odd keys and has one place left; rank 0 is full and gets only keys that it has.
    features = [[rows([2, 3])], [rows([5, 4])]]
    routed = [world.route(r, features[r]) for r in range(2)]
    served = world.serve_all(routed)
    assert served[1].row_ids[0].shape == [0]
    home = all_to_all([t.answers.numpy() for t in served], [t.answer_splits.numpy() for t in served])
    for rank, answers in enumerate(zip(*home, strict=True)):
        said = saying("rank 1 could not answer", "table 'item' (rank 1 of 2): full", "2 rows", "max_vocabulary_size")
        with pytest.raises(tf.errors.ResourceExhaustedError, match=said):
            world.combine(*answers, routed[rank], features[rank])
    assert [shard.as_dict() for (shard,) in world.shards] == before
    # What fits still goes in, for both ranks together: the same new key, and one that is there.
    assert_same(world.rows([[3], [3, 1]])[0], NativeTable(seed=0).lookup([3])[0])


def test_a_request_that_makes_no_sense_is_answered():
    """Once headers are fine a peer waits for the answer: even a request that no sok sends gets one."""
    world = World(2)
    for keys, text in (
        ([1, 0, 0, 3], "key 3 belongs to rank 1"),
        ([2, 0, 0, 4], "message of rank 0 is cut off"),
        ([1, 0, 0, 4, 6], "message of rank 0 is cut off"),
        ([-1, 0, 0], "message of rank 0 is cut off"),
        ([], "message of rank 0 is cut off"),
        ([0, 1], "message of rank 0 is cut off"),
        ([0, 1, 1, 1, 3], "key 3 belongs to rank 1"),
        ([0, 2**62, 2**62, 1, 4], "message of rank 0 is cut off"),
        ([0, 1, -1, 1], "message of rank 0 is cut off"),
        ([0, 1, 2, 1, 4], "message of rank 0 is cut off"),
        ([0, 2, 2, 0, 2, 4, 6], "piece of 0 keys"),
        ([0, 2, 2, -1, 3, 4, 6], "piece of -1 keys"),
        ([0, 2, 2, 1, 2, 4, 6], "piece of 2 keys"),
        ([0, 1, 2, 2**62, 4, 6], "piece of 4611686018427387904 keys"),
        ([0, 1, 2, 1, 4, 6], "in no piece"),
        ([0, 0, 1, 4], "in no piece"),
        ([0, 1, 0, 1], "piece of 1 keys"),
    ):
        words = np.array([*FINE, *keys, *FINE, 0, 0, 0])
        served = world.serve(0, words, i32(HEADER_WORDS + len(keys), HEADER_WORDS + 3))
        assert all(len(ids) == 0 for ids in served.row_ids)
        size = int(served.answer_splits[0])
        routed = world.route(1, [rows([1])])
        home = np.concatenate([served.answers.numpy()[:size], np.zeros(ANSWER_HEADER + 3, np.float32)])
        with pytest.raises(tf.errors.InvalidArgumentError, match=saying("rank 0 could not answer", text)):
            world.combine(home, i32(size, ANSWER_HEADER + 3), routed, [rows([1])])


def test_shapes_are_inferred(lib):
    with tf.Graph().as_default():
        p = tf.compat.v1.placeholder
        handles = [p(tf.resource, []), p(tf.resource, [])]
        group = {"table_of": [0, 1], "slot_num": [1, 1], "max_nnz": [0, 0], "max_feature_num": [0, 0]}
        how = {"Tword": tf.int64, "combiners": ["rows", "sum"], "ways": ["auto", "sums"]}
        splits, weights = [p(tf.int64, [None]), p(tf.int64, [4])], [p(tf.float32, [None])] * 2
        keys = [p(tf.int32, [5]), p(tf.int64, [None])]
        routed = lib.sok_exchange_route(handles, 0, True, keys, splits, weights, **how, **group)
        assert routed.words.shape.as_list() == [None] and routed.words.dtype == tf.int64
        assert [i.shape.as_list() for i in routed.index] == [[5], [None]]
        assert [i.shape.as_list() for i in routed.splits_home] == [[None], [4]]
        by_rows = {name: value for name, value in how.items() if name != "ways"}
        alone = lib.sok_exchange_route_rows(handles, 0, True, keys, splits, weights, **by_rows, **group)
        assert alone.words.shape.as_list() == [None] and [i.shape.as_list() for i in alone.index] == [[5], [None]]
        served = lib.sok_exchange_serve(handles, p(tf.int64, [None]), p(tf.int32, [3]), 0, True, dims=[7, 2], **group)
        assert served.answers.shape.as_list() == [None] and served.answer_splits.shape == [3]
        assert served.counts.shape == [3, 6] and [i.shape.as_list() for i in served.row_ids] == [[None]] * 2
        checked = lib.sok_exchange_check(p(tf.float32, [None]), p(tf.int32, [3]), p(tf.int32, [3]))
        assert checked.checked_answers.shape.as_list() == [None] and checked.checked_splits.shape == [3]
        outputs = lib.sok_exchange_combine(
            *checked, routed.index, routed.splits_home, weights, routed.scales, combiners=["rows", "sum"], dims=[7, 2]
        )
        assert [o.shape.as_list() for o in outputs] == [[5, 7], [3, 2]]
        assert lib.sok_validate_csr(handles[0], keys[0], splits[0]).shape == [5]
        with pytest.raises(ValueError, match="rank 1"):
            keys = [p(tf.int32, [5, 1]), keys[1]]
            lib.sok_exchange_route(handles, 0, True, keys, splits, weights, **how, **group)
        with pytest.raises(ValueError, match="rank 1"):
            lib.sok_exchange_route_rows(handles, 0, True, keys, splits, weights, **by_rows, **group)


def test_wrong_arguments_are_named(lib):
    world = World(2)
    two = World(2, [tf.int32, tf.int32], [3, 4])
    routed = world.route(0, [rows([1, 2])])
    fine = np.array([*FINE, 0, 0, 0] * 2)
    home = np.zeros(2 * ANSWER_HEADER + 6, np.float32)
    asked, other = i32(ANSWER_HEADER + 3, ANSWER_HEADER + 3), i32(ANSWER_HEADER, ANSWER_HEADER + 6)
    message_of = lambda *words: np.concatenate([np.array(words), fine[10:]])  # noqa: E731
    counts = np.array([[1, 0, 0], [0, 1, 2]])  # a key by rows of one rank, a piece of two keys of the other
    sum_grad = lambda counts, splits=(0, 2), row_ids=(0, 1, 2), table_of=(0,): lib.sok_exchange_sum_grad(  # noqa: E731
        home, counts, np.array(splits), [np.array(row_ids)], table_of=list(table_of), dims=[3]
    )
    assert_same(sum_grad(counts).unique_row_ids[0], [0, 1, 2])
    group, shard = world.attributes([0]), world.handles(0)[0]
    cases = [
        (lambda: two.serve(0, np.zeros(20, np.int64), i32(10, 10)), "words must be int64 if"),
        (lambda: world.serve(0, fine.astype(np.int32), i32(10, 10)), "words must be int64 if"),
        (lambda: world.route(0, [rows([1], table=0)], slot_num=0), "`slot_num` must be at least 1"),
        (lambda: world.serve(0, fine, i32(10, 10), tables=[1]), "`table_of` .*tables"),
        (lambda: world.serve(0, fine, i32(20)), r"`splits` must have shape \[2\]. Received: \[1\]"),
        (lambda: world.serve(0, fine, i32(10, 11)), "`splits` must sum to .*20"),
        (lambda: world.serve(0, fine, i32(10, 9)), "`splits` must sum to .*20"),
        (lambda: world.serve(0, fine, i32(18, 2)), "rank 1 .*form"),
        (lambda: world.serve(0, message_of(1, *FINE[1:], 0, 0, 0), i32(10, 10)), "rank 0 .*form"),
        (lambda: world.serve(0, message_of(*FINE[:4], 99, 0, 0, 0, 0, 0), i32(10, 10)), "unknown status 99"),
        (lambda: lib.sok_exchange_serve(world.handles(0), fine, i32(10, 10), 0, True, dims=[4], **group), "have dim 3"),
        (lambda: lib.sok_count_ids(world.handles(0), [np.int64([1]), np.int64([2])]), "one tensor per table"),
        (lambda: world.combine(home, asked[:1], routed, [rows([1, 2])]), r"`splits` must have shape \[2\]"),
        (lambda: world.combine(home[:-1], asked, routed, [rows([1, 2])]), "`splits` does not fit `answers`"),
        (lambda: world.combine(home, other, routed, [rows([1, 2])]), "not those .*asked for"),
        (
            lambda: lib.sok_exchange_combine(
                home, asked, [i32(36)], [NOT_GROUPED], [NO_WEIGHTS], [NO_WEIGHTS], combiners=["rows"], dims=[3]
            ),
            "`index` .*inside the answers",
        ),
        (
            lambda: lib.sok_exchange_combine(
                home, asked, [i32(16)], [np.array([0, 1])], [ONE], [ONE], combiners=["sum"], dims=[3]
            ),
            "`scales` .*per piece",
        ),
        (lambda: lib.sok_validate_csr(shard, np.zeros((1, 1), np.int64), NOT_GROUPED), "`keys` must have rank 1"),
        (lambda: lib.sok_validate_csr(shard, np.zeros(1, np.int64), np.array([1])), "`row_splits` must start with 0"),
        (lambda: sum_grad(counts * 0), "does not have the gradients"),
        (lambda: sum_grad(counts - 2), "`counts` must lie in"),
        (lambda: sum_grad(counts[:, :1]), "per table and two per feature"),
        (lambda: sum_grad(counts, row_ids=[0, 1]), "`row_ids` .*each key"),
        (lambda: sum_grad(counts, row_ids=[0, 1, 2, 3]), "`row_ids` .*each key"),
        (lambda: sum_grad(counts, splits=[0, 1]), "`piece_splits` do not fit `counts`"),
        (lambda: sum_grad(counts, splits=[0, 2, 0]), "`piece_splits` do not fit `counts`"),
        (lambda: sum_grad(counts, splits=[0, 2, 2]), "`piece_splits` do not fit `counts`"),
        (lambda: sum_grad(counts, table_of=[1]), "`table_of` .*tables"),
    ]
    for case, text in cases:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            case()


REPORTS = [
    (report(5, 3), ["key number 3", "dense_shape"]),
    (report(6, 5), ["batch * slot_num", "multiple of 2", "Received: 5"]),
    (report(7, 3), ["slot_num = 2", "Received: 3"]),
    (report(8, 0), ["same number of ids"]),
    (report(9, 0), ["one weight", "each id"]),
    (np.array([-5, 3]), ["`row_splits`", "start with 0"]),  # splits gone wrong are no report
    (np.array([0, 2]), ["`row_splits`", "end with the number of keys"]),
]


@pytest.mark.parametrize(("row_splits", "parts"), REPORTS)
def test_a_malformed_input_raises_on_every_rank(row_splits, parts):
    world = World(2)
    features = [[rows([1, 2])], [(0, [3], row_splits, None, "sum")]]
    routed = [world.route(r, features[r], slot_num=2) for r in range(2)]
    said = (*parts, "input of rank 1: ")
    world.raises_everywhere(routed, tf.errors.InvalidArgumentError, said, slot_num=2)


@pytest.mark.parametrize(("row_splits", "parts"), REPORTS[:5])
def test_a_report_raises_at_once_with_one_rank(lib, row_splits, parts):
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying(*parts, "table 'shop'")):
        lib.sok_validate_csr(NativeTable(name="shop").handle, np.zeros(1, np.int64), row_splits, slot_num=2)


@pytest.mark.parametrize(
    "problem", ["rows_not_whole", "wrong_slot_num", "uneven", "weights_differ", "slot_key_too_large"]
)
def test_check_input_passes_splits_or_reports(lib, problem):
    splits = tf.constant([0, 1, 4], tf.int64)
    assert_same(lib.sok_check_input(splits, True, 9, problem=problem), splits)
    status = {"rows_not_whole": 6, "wrong_slot_num": 7, "uneven": 8, "weights_differ": 9, "slot_key_too_large": 12}[
        problem
    ]
    assert_same(lib.sok_check_input(splits, False, 9, problem=problem), report(status, 9))
    # An earlier report is not written over.
    assert_same(lib.sok_check_input(report(5, 2), False, 9, problem=problem), report(5, 2))
