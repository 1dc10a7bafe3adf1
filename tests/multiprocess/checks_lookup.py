"""Lookups whose keys live on several ranks: what comes back, what comes in, what bad input on one rank does."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup import lookup
from sok.lookup.feature import Csr
from tests.group_features import lookup_pooled
from tests.messages import saying
from tests.multiprocess.harness import World
from tests.ops.tables import fresh_rows

DIM = 3
KEYS = np.array([[5, -1], [5, 12], [2**60, 7], [24, 24], [12, 36]], np.int64)  # 12, 24 and 36 are all of rank 0


def table(name, **options):
    options = {"capacity": 1000, "initializer": "normal", **options}
    return sok.EmbeddingVariable(DIM, name=name, **options)


def keys_of(world: World, per_rank: int = 4) -> np.ndarray:
    """Another set of keys on each rank, overlapping, none at all on the last of several."""
    keys = np.random.default_rng(world.rank).integers(-20, 20, per_rank)
    return keys[:0] if world.size > 1 and world.rank == world.size - 1 else keys


def gathered(array):
    return context.get_transport().all_gather(tf.constant(np.asarray(array)), "test/lookup").numpy()


def check_rows_are_those_of_one_rank(world):
    variable = table("same_rows")
    rows = lookup.lookup_rows(variable, tf.constant(KEYS))
    np.testing.assert_array_equal(rows, lookup.lookup_rows(variable, tf.constant(KEYS), training=False))
    # Every rank asked for the same, so the owners have one row for each distinct key.
    keys, values = variable.export()
    assert set(gathered(keys)) == set(KEYS.ravel().tolist()) and len(gathered(keys)) == len(np.unique(KEYS))
    assert all(int(key) % world.size == world.rank for key in keys.numpy())
    by_key = dict(zip(gathered(keys).tolist(), gathered(values), strict=True))
    return {"rows": rows.numpy(), "by_key": by_key}


def check_an_unseen_key_reads_as_its_initial_value_and_is_not_stored(world):
    variable = table("unseen")
    rows = lookup.lookup_rows(variable, tf.constant(KEYS), training=False)
    assert int(variable.size()) == 0
    return {"rows": rows.numpy()}


def check_gradients_reach_the_owners_summed_over_ranks(world):
    variable = table("gradients")
    keys = keys_of(world)
    with tf.GradientTape() as tape:
        rows = lookup.lookup_rows(variable, tf.constant(keys))
        loss = tf.reduce_sum(rows * (world.rank + 1.0))
    slices = tape.gradient(loss, variable)
    sok.optimizers.SGD(1.0).apply_gradients([(slices, variable)])
    own_keys, after = (t.numpy() for t in variable.export())
    everyone = [keys_of(World(rank, world.size)) for rank in range(world.size)]
    for key, row in zip(own_keys, after, strict=True):
        expected = sum((rank + 1.0) * np.sum(keys == key) for rank, keys in enumerate(everyone))
        np.testing.assert_allclose(initial_row(variable, key) - row, expected, rtol=1e-5, err_msg=str(key))


def initial_row(variable, key):
    """A key's initial row, without the table and without a collective."""
    return fresh_rows([key], variable.seed, variable._initializer_spec, variable.dim, variable.key_dtype)[0]


def check_pooling_is_that_of_tf_nn(world):
    variable = table("pooling")
    rng = np.random.default_rng(100 + world.rank)
    lengths = rng.integers(0, 4, 6) if world.rank else np.zeros(6, int)  # rank 0 asks for nothing
    keys = rng.integers(0, 30, lengths.sum())
    weights = rng.uniform(0.5, 2.0, lengths.sum()).astype(np.float32)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    dense = np.stack([initial_row(variable, key) for key in range(30)])
    sp_ids = tf.RaggedTensor.from_row_splits(tf.constant(keys), splits).to_sparse()
    sp_weights = tf.RaggedTensor.from_row_splits(tf.constant(weights), splits).to_sparse()
    for combiner in ("sum", "mean", "sqrtn"):
        for mine, theirs in ((None, None), (tf.constant(weights), sp_weights)):
            csr = Csr(tf.constant(keys), tf.constant(splits), mine)
            pooled = lookup_pooled(variable, csr, combiner)
            if len(keys) == 0:
                np.testing.assert_array_equal(pooled, np.zeros([6, DIM]))
            else:
                expected = tf.nn.embedding_lookup_sparse(dense, sp_ids, theirs, combiner=combiner)
                expected = np.pad(expected, [(0, 6 - len(expected)), (0, 0)])  # trailing empty segments
                np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)


def check_rows_are_not_rounded_in_memory_that_ranks_share(world):
    exact = 1 + 2.0**-20
    halves = table("not_rounded", exchange_dtype="float16")
    halves.assign([1, 2], [[exact] * DIM] * 2)
    keys = tf.constant([2, 1], tf.int64)
    with tf.GradientTape() as tape:
        rows = lookup.lookup_rows(halves, keys)
        loss = tf.reduce_sum(rows * exact)
    np.testing.assert_array_equal(rows, np.full([2, DIM], np.float32(exact)))
    gradient = tape.gradient(loss, halves)
    np.testing.assert_array_equal(gradient.values, np.full(gradient.values.shape, np.float32(exact) * world.size))


def check_all_keys_on_one_owner(world):
    variable = table("one_owner")
    keys = 12 * np.arange(10)
    rows = lookup.lookup_rows(variable, tf.constant(keys))
    assert int(variable.size()) == (10 if world.rank == 0 else 0)
    return {"rows": rows.numpy()}


def check_nobody_has_keys(world):
    variable = table("nobody")
    with tf.GradientTape() as tape:
        rows = lookup.lookup_rows(variable, tf.zeros([0], tf.int64))
        loss = tf.reduce_sum(rows)
    assert rows.shape == [0, DIM]
    slices = tape.gradient(loss, variable)
    sok.optimizers.Adam(0.1).apply_gradients([(slices, variable)])
    assert int(variable.size()) == 0


def check_all_key_dtypes(world):
    for dtype, values in (
        (tf.int32, [-(2**31), -1, 2**31 - 1]),
        (tf.uint32, [0, 2**31, 2**32 - 1]),
        (tf.int64, [-(2**63), -1, 2**63 - 1]),
        (tf.uint64, [0, 2**63, 2**64 - 1]),
    ):
        variable = table(f"keys_{dtype.name}", key_dtype=dtype)
        keys = tf.constant(values, dtype)
        rows = lookup.lookup_rows(variable, keys)
        here = [value for value in values if value % world.size == world.rank]
        assert sorted(variable.export()[0].numpy().tolist()) == sorted(here)
        for value, row in zip(values, rows.numpy(), strict=True):
            np.testing.assert_array_equal(row, initial_row(variable, value))


def check_a_bad_key_on_one_rank_raises_on_all(world):
    identity = table("identity", hashed=False, capacity=10)
    good, bad = 0, 10 * world.size  # of all ranks the last one has a key too large
    keys = tf.constant([bad if world.rank == world.size - 1 else good], tf.int64)
    step = tf.function(lambda keys: lookup.lookup_rows(identity, keys))
    for call in (step, lambda keys: lookup.lookup_rows(identity, keys)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"identity.*{bad}|{bad}.*identity"):
            call(keys)
        # The job goes on: the ranks are in step.
        assert call(tf.constant([good], tf.int64)).shape == [1, DIM]


def check_too_many_keys_on_one_rank_raise_on_all(world):
    layer = sok.DistributedEmbedding("sum", 100, DIM, slot_num=1, max_nnz=2, name="narrow")
    lengths = [3 if world.rank == 0 else 1, 1]
    ids = tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths), dtype=tf.int64), lengths)[:, tf.newaxis, :]
    with pytest.raises(tf.errors.InvalidArgumentError, match="narrow"):
        layer(ids)
    assert layer(tf.ones([2, 1, 2], tf.int64)).shape == [2, 1, DIM]


def check_weights_and_indices_that_do_not_fit_on_one_rank_raise_on_all(world):
    is_bad = world.rank == world.size - 1
    pooled = sok.DistributedEmbedding("sum", 100, DIM, slot_num=1, max_nnz=2, name="weighted")
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2], tf.int64), [2, 0])
    weights = tf.RaggedTensor.from_row_lengths([1.0, 2.0], [1, 1] if is_bad else [2, 0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="weighted.*there must be one weight"):
        pooled(ids, weights=weights)
    fixed = sok.All2AllDenseEmbedding(100, DIM, slot_num=2, nnz_per_slot=1, name="full")
    sparse = tf.SparseTensor([[0, 0], [0, 0 if is_bad else 1]], tf.constant([5, 6], tf.int64), [1, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="full.*without gaps"):
        fixed(sparse)
    assert pooled(ids).shape == [2, 1, DIM] and fixed(tf.ones([1, 2], tf.int64)).shape == [1, 2, 1, DIM]


def check_a_full_shard_raises_on_all_and_changes_nothing(world):
    small = table("small", capacity=4)
    before = 12 * np.arange(3)  # of rank 0, whose shard has room for one more
    lookup.lookup_rows(small, tf.constant(before))
    too_many = 12 * np.arange(2, 6) if world.rank == world.size - 1 else before
    with pytest.raises(tf.errors.ResourceExhaustedError, match="(?s)small.*4|4.*small"):
        lookup.lookup_rows(small, tf.constant(too_many))
    assert int(small.size()) == (3 if world.rank == 0 else 0)
    assert lookup.lookup_rows(small, tf.constant(before)).shape == [3, DIM]


def check_a_layer_takes_three_collectives_a_step(world):
    layers = [
        sok.DistributedEmbedding("mean", 100, DIM, slot_num=2, max_nnz=2, name="counted"),
        sok.All2AllDenseEmbedding(100, DIM, slot_num=2, nnz_per_slot=2, name="counted_dense"),
    ]
    weight = tf.Variable(1.0)
    other = tf.Variable([2.0])
    optimizer = sok.optimizers.Adam(0.1)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(layer(ids)) for layer in layers) * weight + other[0]
        tables = [layer.embedding_variable for layer in layers]
        distributed = sok.DistributedGradientTape(tape)
        grads = distributed.gradient(loss, [*tables, weight, other])
        optimizer.apply_gradients(zip(grads[:2], tables, strict=True))
        return grads[2]

    ids = tf.constant(np.arange(12).reshape(3, 2, 2), tf.int64)
    for run in (step, tf.function(step)):
        run(ids)
        with sok.trace() as t:
            for _ in range(5):
                run(ids)
        # Three for each layer, and one for all dense gradients.
        assert t.collectives == (5 * (2 * 3 + 1) if world.size > 1 else 0), t.by_name
        if world.size > 1:
            assert t.bytes > 0
            kinds = {(name.rpartition("/")[0] or name, count["kind"]) for name, count in t.by_name.items()}
            assert len(t.by_name) == 7, kinds


def check_forward_alone_takes_two_collectives(world):
    layer = sok.DistributedEmbedding("mean", 100, DIM, slot_num=2, max_nnz=2, name="counted_forward")
    with sok.trace() as t:
        layer(tf.zeros([3, 2, 2], tf.int64), training=False)
    assert t.collectives == (2 if world.size > 1 else 0)


def check_lookups_in_loops_and_inner_functions(world):
    variable = table("loops")

    @tf.function
    def inner(keys):
        return tf.reduce_sum(lookup.lookup_rows(variable, keys) ** 2)

    @tf.function
    def step(keys):
        total = tf.constant(0.0)
        for i in tf.range(3):
            total += tf.reduce_sum(lookup.lookup_rows(variable, keys + tf.cast(i, tf.int64)))
        with tf.GradientTape() as tape:
            loss = inner(keys) + 2.0 * inner(keys + 1)
        slices = tape.gradient(loss, variable)
        return total, loss, tf.math.unsorted_segment_sum(slices.values, slices.indices, 100)

    keys = tf.constant([1, 2, 3], tf.int64)
    rows = {key: initial_row(variable, key) for key in range(1, 6)}
    expected = sum(rows[key + i].sum() for key in (1, 2, 3) for i in range(3))
    losses = sum((rows[key] ** 2).sum() + 2.0 * (rows[key + 1] ** 2).sum() for key in (1, 2, 3))
    for _ in range(5):
        total, loss, by_row = step(keys)
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(loss, losses, rtol=1e-5)
    own_keys = [key for key in variable.export()[0].numpy().tolist()]
    for row_id, key in enumerate(own_keys):
        factor = world.size * 2.0 * ((key in (1, 2, 3)) + 2.0 * (key - 1 in (1, 2, 3)))
        np.testing.assert_allclose(by_row[row_id], factor * rows[key], rtol=1e-5, atol=1e-6)


def check_tables_of_v1_sessions(world):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = table("in_session")
        rows = lookup.lookup_rows(variable, tf.constant(KEYS))
        loss = tf.reduce_sum(rows) * (world.rank + 1.0)
        (grad,) = tf.gradients(loss, [variable])
        train = sok.optimizers.SGD(0.5).apply_gradients([(grad, variable)])
        session.run(tf.compat.v1.global_variables_initializer())
        first, _ = session.run([rows, train])
        second = session.run(rows)
    counts = {key: np.sum(key == KEYS) for key in KEYS.ravel()}
    moved = 0.5 * sum(range(1, world.size + 1)) * np.array([[counts[key] for key in row] for row in KEYS])
    np.testing.assert_allclose(first - second, np.repeat(moved[..., None], DIM, axis=2), rtol=1e-5)
    return {"rows": first}


def check_slots_that_are_distinct_have_rows_of_their_own(world):
    layer = sok.DistributedEmbedding("sum", 100, 4, 2, 1, distinct_slots=True, name="distinct_slots")
    found = layer(tf.constant([[7, 7], [world.rank, 7]], tf.int64)).numpy()
    assert not np.allclose(found[0, 0], found[0, 1])
    np.testing.assert_array_equal(found[0, 1], found[1, 1])
    everyone = context.get_transport().all_gather(layer.embedding_variable.size()[tf.newaxis], "distinct/size")
    assert int(tf.reduce_sum(everyone)) == 2 + world.size
    too_large = 2**62 if world.rank == world.size - 1 else 1
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("distinct_slots", str(2**62))):
        layer(tf.constant([[1, too_large]], tf.int64))


def check_a_step_that_nobody_holds_leaves_no_graph(world):
    table = sok.EmbeddingVariable(dim=2, capacity=10, name="of_a_step_that_goes")
    graphs = []

    @tf.function
    def step(ids):
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
        grads = tape.gradient(loss, [table])
        optimizer.apply_gradients(zip(grads, [table], strict=True))

    optimizer = sok.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
    step(tf.constant([1, 2], tf.int64))
    assert graphs[0]() is not None
    del step
    gc.collect()
    assert graphs[0]() is None
