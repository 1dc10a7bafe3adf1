"""What comes home is combined to what one rank gives; NumPy moves the messages, and judges."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.ops.tables import KEY_TYPES, NativeTable
from tests.ops.worlds import FINE, NO_WEIGHTS, World, i32
from tests.reference import combine as combine_reference
from tests.reference.exchange import all_to_all
from tests.reference.judge import assert_close, assert_same
from tests.reference.keys import extreme_keys


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
                *lib.sok_exchange_check(home, routed.asked, routed.asked),
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
