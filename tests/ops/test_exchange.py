"""Routing, serving and combining over R ranks that live in one process; NumPy moves the messages."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok import _ops
from tests.ops.shapes import SHAPES, make_keys
from tests.ops.tables import KEY_TYPES, NativeTable
from tests.reference import combine as combine_reference
from tests.reference.csr import first_fault
from tests.reference.exchange import ANSWER_HEADER, MAGIC, all_to_all, cut, message, owner, route
from tests.reference.judge import assert_close, assert_same
from tests.reference.keys import KEY_DTYPES, extreme_keys

NOT_GROUPED = np.zeros(0, np.int64)
NO_WEIGHTS, ONE = np.zeros(0, np.float32), np.ones(1, np.float32)
HEADER_WORDS = 7
FINE = [MAGIC, 0, 0, 1, 0, 0, 0]  # the header of a first call
FIRST = np.int32(-(2**31))


def word_type(*key_dtypes):
    return tf.int64 if any(dtype.size == 8 for dtype in key_dtypes) else tf.int32


class World:
    """R shards of each of some tables, and the lookup of sok.exchange without its collectives.

    A feature is (table, keys, row_splits or None for rows, weights or None, combiner).
    """

    def __init__(self, world_size, key_dtypes=(tf.int64,), dims=(3,), capacity=1 << 20, hashed=True, ways=None):
        self.size, self.dims, self.key_dtypes = world_size, list(dims), key_dtypes
        self.ways = list(ways or ["auto"] * len(dims))
        self.shards = [
            [
                NativeTable(dim=d, capacity=capacity, key_dtype=k, hashed=hashed, world_size=world_size, rank=r, seed=t)
                for t, (d, k) in enumerate(zip(dims, key_dtypes, strict=True))
            ]
            for r in range(world_size)
        ]

    def handles(self, rank):
        return [shard.handle for shard in self.shards[rank]]

    def attributes(self, tables, limits=None):
        limits = {"slot_num": 1, "max_nnz": 0, "max_feature_num": 0} | (limits or {})
        return {"table_of": list(tables)} | {name: [value] * len(tables) for name, value in limits.items()}

    def route(self, rank, features, insert=True, call=0, program=0, **limits):
        return _ops.lib().sok_exchange_route(
            self.handles(rank),
            call,
            insert,
            [self.shards[rank][f[0]].keys(f[1]) for f in features],
            [NOT_GROUPED if f[2] is None else np.asarray(f[2], np.int64) for f in features],
            [NO_WEIGHTS if f[3] is None else np.asarray(f[3], np.float32) for f in features],
            Tword=word_type(*self.key_dtypes),
            combiners=[f[4] for f in features],
            ways=self.ways,
            program=program,
            **self.attributes([f[0] for f in features], limits),
        )

    def serve(self, rank, words, splits, tables=(0,), insert=True, call=0, program=0, **limits):
        return _ops.lib().sok_exchange_serve(
            self.handles(rank),
            words,
            splits,
            call,
            insert,
            program=program,
            dims=self.dims,
            **self.attributes(tables, limits),
        )

    def combine(self, home, splits, routed, features):
        return _ops.lib().sok_exchange_combine(
            home,
            splits,
            routed.asked,
            routed.index,
            routed.splits_home,
            [NO_WEIGHTS if f[3] is None else np.asarray(f[3], np.float32) for f in features],
            routed.scales,
            combiners=[f[4] for f in features],
            dims=[self.dims[f[0]] for f in features],
        )

    def serve_all(self, routed, tables=(0,), insert=True, **limits):
        received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
        return [self.serve(r, *m, tables, insert, **limits) for r, m in enumerate(zip(*received, strict=True))]

    def lookup(self, features_of_rank, insert=True, **limits):
        """For each rank the outputs of its features."""
        routed = [self.route(r, features, insert, **limits) for r, features in enumerate(features_of_rank)]
        served = self.serve_all(routed, [f[0] for f in features_of_rank[0]], insert, **limits)
        home = all_to_all([t.answers.numpy() for t in served], [t.answer_splits.numpy() for t in served])
        return [
            [output.numpy() for output in self.combine(*answers, routed[r], features_of_rank[r])]
            for r, answers in enumerate(zip(*home, strict=True))
        ]

    def rows(self, keys_of_rank, insert=True):
        return [outputs[0] for outputs in self.lookup([[rows(keys)] for keys in keys_of_rank], insert)]

    def raises_everywhere(self, routed, error, texts, tables=(0,), **limits):
        received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
        for rank, words in enumerate(zip(*received, strict=True)):
            with pytest.raises(error) as raised:
                self.serve(rank, *words, tables, **limits)
            for text in (*texts, f"rank {rank} of {self.size}"):
                assert text in raised.value.message
        assert all(shard.size() == 0 for shards in self.shards for shard in shards)


def rows(keys, table=0):
    return (table, keys, None, None, "rows")


def i32(*x):
    return np.array(x, np.int32)


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


# The way there and back.


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_world_gives_what_one_rank_gives(rng, key_dtype, world_size, hashed):
    world = World(world_size, [key_dtype], hashed=hashed)
    one = NativeTable(key_dtype=key_dtype, hashed=hashed, seed=0)
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
        for got, mine in zip(world.rows(keys), keys, strict=True):
            assert_same(got, one.lookup(mine)[0])
    together = {key: row for (shard,) in world.shards for key, row in shard.as_dict().items()}
    assert together == one.as_dict()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-20, 20), max_size=15), min_size=1, max_size=4), st.booleans())
def test_route_serve_and_combine_give_every_rank_its_rows(keys_of_rank, insert):
    world, one = World(len(keys_of_rank)), NativeTable(seed=0)
    for got, keys in zip(world.rows(keys_of_rank, insert), keys_of_rank, strict=True):
        assert_same(got, one.lookup(keys)[0])
    distinct = {k for keys in keys_of_rank for k in keys}
    assert sum(shard.size() for (shard,) in world.shards) == (len(distinct) if insert else 0)


def random_feature(rng, table, key_dtype, combiner, weighted):
    lengths = rng.integers(0, 4, rng.integers(0, 9))
    keys = rng.integers(0, 12, lengths.sum()).astype(key_dtype.as_numpy_dtype)
    weights = rng.uniform(-1, 2, len(keys)).astype(np.float32) if weighted else None
    return (table, keys, None if combiner == "rows" else np.concatenate([[0], np.cumsum(lengths)]), weights, combiner)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_groups_of_any_make_are_what_numpy_says(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    world_size = data.draw(st.integers(1, 4))
    dtypes = data.draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=4))
    dims = [data.draw(st.sampled_from([1, 2, 3, 8, 16, 32, 33])) for _ in dtypes]
    plan = [
        (
            data.draw(st.integers(0, len(dims) - 1)),
            data.draw(st.sampled_from(["sum", "mean", "sqrtn", "rows"])),
            data.draw(st.booleans()),
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    world = World(world_size, dtypes, dims, ways=[data.draw(st.sampled_from(["auto", "rows", "sums"])) for _ in dims])
    features = [
        [random_feature(rng, table, dtypes[table], combiner, w and combiner != "rows") for table, combiner, w in plan]
        for _ in range(world_size)
    ]
    alone = [NativeTable(dim=d, key_dtype=k, seed=t) for t, (d, k) in enumerate(zip(dims, dtypes, strict=True))]
    routed = [world.route(r, of_rank) for r, of_rank in enumerate(features)]
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    tables = [table for table, *_ in plan]
    served = [world.serve(r, *m, tables) for r, m in enumerate(zip(*received, strict=True))]
    home = all_to_all([t.answers.numpy() for t in served], [t.answer_splits.numpy() for t in served])
    packed, packed_splits = [], []
    expected = [{} for _ in dims]  # gradient of each key of each table
    for r, (answers, splits) in enumerate(zip(*home, strict=True)):
        outputs = world.combine(answers, splits, routed[r], features[r])
        upstream = [rng.normal(size=o.shape).astype(np.float32) for o in outputs]
        for (table, keys, row_splits, weights, combiner), output, grad in zip(
            features[r], outputs, upstream, strict=True
        ):
            of_keys = alone[table].lookup(keys)[0].numpy()
            if combiner == "rows":
                assert_same(output, of_keys)
                of_each = grad
            else:
                index = np.arange(len(keys))
                assert_close(output, combine_reference.combine(of_keys, index, row_splits, weights, combiner), scale=10)
                of_each = combine_reference.combine_grad_rows(grad, index, row_splits, weights, len(keys), combiner)
            for key, g in zip(keys.tolist(), of_each, strict=True):
                expected[table][key] = expected[table].get(key, 0.0) + g
        packed.append(
            _ops.lib()
            .sok_exchange_combine_grad(
                upstream,
                splits,
                routed[r].index,
                routed[r].splits_home,
                [NO_WEIGHTS if f[3] is None else f[3] for f in features[r]],
                routed[r].scales,
                combiners=[f[4] for f in features[r]],
                dims=[dims[f[0]] for f in features[r]],
            )
            .numpy()
        )
        packed_splits.append(splits)
    found = [{} for _ in dims]
    for r, (gradients, splits) in enumerate(zip(*all_to_all(packed, packed_splits), strict=True)):
        assert_same(splits, served[r].answer_splits)
        row_ids, sums = _ops.lib().sok_exchange_sum_grad(
            gradients, served[r].counts, served[r].piece_splits, served[r].row_ids, table_of=tables, dims=dims
        )
        for t, (ids, grads) in enumerate(zip(row_ids, sums, strict=True)):
            keys_of_row = world.shards[r][t].export()[0]
            for row_id, g in zip(ids.numpy(), grads.numpy(), strict=True):
                key = int(keys_of_row[row_id])
                assert key not in found[t]
                found[t][key] = g
    for of_table, of_found in zip(expected, found, strict=True):
        assert set(of_table) == set(of_found)
        for key, g in of_table.items():
            assert_close(of_found[key], g, scale=30)


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


def test_gradients_reach_handles_and_weights(lib, call, rng):
    world = World(2, [tf.int64, tf.int64], dims=[2, 3])
    words = np.array([*FINE, 2, 1, *[0] * 4, 4, 6, 2, *FINE, 1, 0, *[0] * 4, 6])
    upstream = rng.normal(size=16 + 4 + 3 + 16 + 2).astype(np.float32)
    handles = world.handles(0)

    def step(words):
        with tf.GradientTape() as tape:
            tape.watch(handles)
            loss = tf.reduce_sum(world.serve(0, words, i32(16, 14), [0, 1]).answers * upstream)
        grads = tape.gradient(loss, handles)
        assert all(grad.dense_shape is None for grad in grads)
        return [(grad.values, grad.indices) for grad in grads]

    (values, indices), (other_values, other_indices) = call(step, tf.constant(words))
    assert_same(indices, [0, 1])  # both ranks asked for row 1
    assert_same(values, [upstream[16:18], upstream[18:20] + upstream[39:]])
    assert_same(other_indices, [0])
    assert_same(other_values, upstream[20:23][None])

    keys, splits = np.array([4, 5, 4]), [0, 2, 3]
    weights = rng.uniform(0.5, 2, 3).astype(np.float32)
    routed = world.route(0, [(0, keys, splits, weights, "mean"), (1, keys[:0], [0], None, "sum")])
    home = rng.normal(size=int(tf.reduce_sum(routed.asked))).astype(np.float32)
    home[[0, int(routed.asked[0])]] = 0.0
    of_output = rng.normal(size=(2, 2)).astype(np.float32)

    def back(home, weights):
        with tf.GradientTape() as tape:
            tape.watch([home, weights])
            pooled, nothing = lib.sok_exchange_combine(
                home,
                routed.asked,
                routed.asked,
                routed.index,
                [np.array(splits, np.int64), np.zeros(1, np.int64)],
                [weights, NO_WEIGHTS],
                [NO_WEIGHTS, NO_WEIGHTS],
                combiners=["mean", "sum"],
                dims=[2, 3],
            )
            assert nothing.shape == [0, 3]
            loss = tf.reduce_sum(pooled * of_output)
        return tape.gradient(loss, [home, weights])

    grad_home, grad_weights = call(back, tf.constant(home), tf.constant(weights))
    places = routed.index[0].numpy() & 0x7FFFFFFF
    of_keys = np.stack([home[p : p + 2] for p in places])
    index, row_splits = np.arange(3), np.array(splits)
    assert_close(
        grad_weights, combine_reference.combine_grad_weights(of_output, of_keys, index, row_splits, weights, "mean")
    )
    expected = np.zeros_like(home)
    for p, g in zip(
        places, combine_reference.combine_grad_rows(of_output, index, row_splits, weights, 3, "mean"), strict=True
    ):
        expected[p : p + 2] += g
    assert_close(grad_home, expected)


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
    world = World(2, [key_dtype])
    features = [[(0, [1, 2, 3], [0, 1, 2, 3, 3], None, "sum")], [(0, range(7), row_splits, None, "sum")]]
    if text is None:
        world.lookup(features, **limits)
        return
    routed = [world.route(r, features[r], **limits) for r in range(2)]
    world.raises_everywhere(routed, tf.errors.InvalidArgumentError, (text, "input of rank 1: "), **limits)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ((0, [1, 2], [0, 3], None, "sum"), "`row_splits` must start with 0, never fall"),
        ((0, [1, 2], [0, 2], [1.0, 2.0, 3.0], "sum"), "`weights` must have one value per key (2) or none. Received: 3"),
        ((0, [1, 2], [0, 2], [[1.0, 2.0]], "sum"), "`weights` must have rank 1"),
        ((0, [[1, 2]], [0, 2], None, "sum"), "`keys` must have rank 1"),
        ((0, [1, 2], [[0, 2]], None, "sum"), "`row_splits` must have rank 1"),
        ((0, tf.constant([1, 2]), [0, 2], None, "sum"), "keys must be int64. Received: int32"),
    ],
)
def test_malformed_input_raises_on_every_rank(bad, text):
    world = World(3)
    routed = [world.route(r, [(0, [1], [0, 1], None, "sum"), bad if r == 2 else rows([4])]) for r in range(3)]
    world.raises_everywhere(routed, tf.errors.InvalidArgumentError, (text, "input of rank 2: "), [0, 0])


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
    ("other", "text"),
    [
        ({"call": 8}, "are in different calls of this lookup: by rank, call 7, 8"),
        ({"insert": False}, "`training` must be the same on all workers. Received, by rank: 1, 0"),
        ({"program": 4}, "look up different tables in one exchange"),
    ],
)
def test_ranks_that_are_not_in_step_all_raise(other, text):
    world = World(2)
    mine = {"call": 7, "program": 3, "insert": True}
    of_rank = [mine, mine | other]
    routed = [world.route(r, [rows([1, 2])], **of_rank[r]) for r in range(2)]
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    for rank, words in enumerate(zip(*received, strict=True)):
        with pytest.raises(tf.errors.FailedPreconditionError) as error:
            world.serve(rank, *words, **of_rank[rank])
        assert text in error.value.message and f"table 'item' (rank {rank} of 2)" in error.value.message
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
        with pytest.raises(tf.errors.ResourceExhaustedError) as error:
            world.combine(*answers, routed[rank], features[rank])
        for text in ("rank 1 could not answer", "table 'item' (rank 1 of 2): full: all 2 rows", "max_vocabulary_size"):
            assert text in error.value.message
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
        ([0, 2, 2, 0, 2, 4, 6], "piece of 0 keys where at most 2 are left"),
        ([0, 2, 2, -1, 3, 4, 6], "piece of -1 keys where at most 2 are left"),
        ([0, 2, 2, 1, 2, 4, 6], "piece of 2 keys where at most 1 are left"),
        ([0, 1, 2, 2**62, 4, 6], "piece of 4611686018427387904 keys where at most 2 are left"),
        ([0, 1, 2, 1, 4, 6], "has keys that are in no piece"),
        ([0, 0, 1, 4], "has keys that are in no piece"),
        ([0, 1, 0, 1], "piece of 1 keys where at most 0 are left"),
    ):
        words = np.array([*FINE, *keys, *FINE, 0, 0, 0])
        served = world.serve(0, words, i32(HEADER_WORDS + len(keys), HEADER_WORDS + 3))
        assert all(len(ids) == 0 for ids in served.row_ids)
        size = int(served.answer_splits[0])
        routed = world.route(1, [rows([1])])
        home = np.concatenate([served.answers.numpy()[:size], np.zeros(ANSWER_HEADER + 3, np.float32)])
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            world.combine(home, i32(size, ANSWER_HEADER + 3), routed, [rows([1])])
        assert "rank 0 could not answer" in error.value.message and text in error.value.message


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
        served = lib.sok_exchange_serve(handles, p(tf.int64, [None]), p(tf.int32, [3]), 0, True, dims=[7, 2], **group)
        assert served.answers.shape.as_list() == [None] and served.answer_splits.shape == [3]
        assert served.counts.shape == [3, 6] and [i.shape.as_list() for i in served.row_ids] == [[None]] * 2
        outputs = lib.sok_exchange_combine(
            p(tf.float32, [None]), p(tf.int32, [3]), p(tf.int32, [3]), routed.index, routed.splits_home, weights,
            routed.scales, combiners=["rows", "sum"], dims=[7, 2],
        )  # fmt: skip
        assert [o.shape.as_list() for o in outputs] == [[5, 7], [3, 2]]
        assert lib.sok_validate_csr(handles[0], keys[0], splits[0]).shape == [5]
        with pytest.raises(ValueError, match="rank 1"):
            keys = [p(tf.int32, [5, 1]), keys[1]]
            lib.sok_exchange_route(handles, 0, True, keys, splits, weights, **how, **group)


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
        (lambda: world.serve(0, fine, i32(10, 10), tables=[1]), "`table_of` must name one of the tables"),
        (lambda: world.serve(0, fine, i32(20)), r"`splits` must have shape \[2\]. Received: \[1\]"),
        (lambda: world.serve(0, fine, i32(10, 11)), "`splits` must sum to the number of words, 20"),
        (lambda: world.serve(0, fine, i32(10, 9)), "`splits` must sum to the number of words, 20"),
        (lambda: world.serve(0, fine, i32(18, 2)), "the message of rank 1 has another form"),
        (lambda: world.serve(0, message_of(1, *FINE[1:], 0, 0, 0), i32(10, 10)), "message of rank 0 has another form"),
        (lambda: world.serve(0, message_of(*FINE[:4], 99, 0, 0, 0, 0, 0), i32(10, 10)), "unknown status 99"),
        (lambda: lib.sok_exchange_serve(world.handles(0), fine, i32(10, 10), 0, True, dims=[4], **group), "have dim 3"),
        (lambda: world.combine(home, asked[:1], routed, [rows([1, 2])]), r"`splits` must have shape \[2\]"),
        (lambda: world.combine(home[:-1], asked, routed, [rows([1, 2])]), "`splits` does not fit `answers`"),
        (lambda: world.combine(home, other, routed, [rows([1, 2])]), "are not those that were asked for"),
        (
            lambda: lib.sok_exchange_combine(
                home, asked, asked, [i32(36)], [NOT_GROUPED], [NO_WEIGHTS], [NO_WEIGHTS], combiners=["rows"], dims=[3]
            ),
            "`index` must lie inside the answers",
        ),
        (
            lambda: lib.sok_exchange_combine(
                home, asked, asked, [i32(16)], [np.array([0, 1])], [ONE], [ONE], combiners=["sum"], dims=[3]
            ),
            "`scales` must have one value per piece of a feature without weights",
        ),
        (lambda: lib.sok_validate_csr(shard, np.zeros((1, 1), np.int64), NOT_GROUPED), "`keys` must have rank 1"),
        (lambda: lib.sok_validate_csr(shard, np.zeros(1, np.int64), np.array([1])), "`row_splits` must start with 0"),
        (lambda: sum_grad(counts * 0), "does not have the gradients"),
        (lambda: sum_grad(counts - 2), "`counts` must lie in"),
        (lambda: sum_grad(counts[:, :1]), "one column per table and two per feature"),
        (lambda: sum_grad(counts, row_ids=[0, 1]), "`row_ids` must have one value for each key"),
        (lambda: sum_grad(counts, row_ids=[0, 1, 2, 3]), "`row_ids` must have one value for each key"),
        (lambda: sum_grad(counts, splits=[0, 1]), "`piece_splits` do not fit `counts`"),
        (lambda: sum_grad(counts, splits=[0, 2, 0]), "`piece_splits` do not fit `counts`"),
        (lambda: sum_grad(counts, splits=[0, 2, 2]), "`piece_splits` do not fit `counts`"),
        (lambda: sum_grad(counts, table_of=[1]), "`table_of` must name one of the tables"),
    ]
    for case, text in cases:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            case()


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
    features = [[rows([1, 2])], [(0, [3], row_splits, None, "sum")]]
    routed = [world.route(r, features[r], slot_num=2) for r in range(2)]
    texts = (text, "input of rank 1: ")
    world.raises_everywhere(routed, tf.errors.InvalidArgumentError, texts, slot_num=2)


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
