"""Many tables by one exchange on real workers: outputs, gradients, collectives; what bad input on one rank does."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group
from tests.group_features import FEATURES, TABLES, features_of, make_tables
from tests.multiprocess.harness import World
from tests.ops.tables import fresh_rows
from tests.reference import combine as reference

SEGMENTS, NUM_KEYS = 6, 20


def inputs_of(world: World):
    """Keys, splits, weights and upstream gradients of a rank: none of feature 4, no keys at all on the last rank."""
    rng = np.random.default_rng(world.rank)
    segments = SEGMENTS + world.rank
    inputs = []
    for f, (table, _, weighted) in enumerate(FEATURES):
        empty = f == 4 or (world.size > 1 and world.rank == world.size - 1)
        lengths = np.zeros(segments, int) if empty else rng.integers(0, 4, segments)
        n = int(lengths.sum())
        inputs.append((
            rng.integers(0, NUM_KEYS, n).astype(TABLES[table][1].as_numpy_dtype),
            np.concatenate([[0], np.cumsum(lengths)]),
            rng.uniform(0.5, 2, n).astype(np.float32) if weighted else None,
            rng.normal(size=(segments, TABLES[table][0])).astype(np.float32),
        ))  # fmt: skip
    return inputs


def as_tensors(inputs):
    return [tuple(None if x is None else tf.constant(x) for x in of_feature) for of_feature in inputs]


def initial_rows(variable):
    return fresh_rows(range(NUM_KEYS), variable.seed, variable._initializer_spec, variable.dim, variable.key_dtype)


def expected_outputs(rows, inputs):
    return [
        reference.combine(rows[table], keys.astype(np.int64), splits, weights, combiner)
        for (table, combiner, _), (keys, splits, weights, _) in zip(FEATURES, inputs, strict=True)
    ]


def expected_gradients(world):
    """Of each key of each table, summed over the ranks."""
    sums = [np.zeros([NUM_KEYS, dim]) for dim, _, _ in TABLES]
    for rank in range(world.size):
        for (table, combiner, _), (keys, splits, weights, grad) in zip(
            FEATURES, inputs_of(World(rank, world.size)), strict=True
        ):
            sums[table] += reference.combine_grad_rows(grad, keys.astype(np.int64), splits, weights, NUM_KEYS, combiner)
    return sums


def check_group_is_what_numpy_says(world):
    for kind, way_home in itertools.product(("eager", "function"), ("auto", "rows", "sums")):
        tables = make_tables(f"group_{kind}_{way_home}", 100, initializer="normal", way_home=way_home)
        rows = [initial_rows(table) for table in tables]
        optimizer = sok.optimizers.SGD(1.0)

        def step(inputs, tables=tables, optimizer=optimizer):
            with tf.GradientTape() as tape:
                outputs = lookup_group(features_of(tables, inputs))
                loss = tf.add_n([tf.reduce_sum(o * i[3]) for o, i in zip(outputs, inputs, strict=True)])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
            return outputs

        inputs = as_tensors(inputs_of(world))
        run = tf.function(step) if kind == "function" else step
        with sok.trace() as trace:
            outputs = run(inputs)
        for output, expected in zip(outputs, expected_outputs(rows, inputs_of(world)), strict=True):
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
        gradients = expected_gradients(world)
        for t, table in enumerate(tables):
            keys, after = (x.numpy() for x in table.export())
            assert all(int(key) % world.size == world.rank for key in keys)
            moved = rows[t][keys.astype(np.int64)] - after
            np.testing.assert_allclose(moved, gradients[t][keys.astype(np.int64)], rtol=1e-4, atol=1e-5)
        # Forward two and backward one, for six features of four tables of four widths.
        assert trace.collectives == (3 if world.size > 1 else 0), trace.by_name
        assert sorted(name.split("/")[2] for name in trace.by_name) == (
            ["grads", "keys", "rows"] if world.size > 1 else []
        )
        with sok.trace() as trace:
            lookup_group(features_of(tables, inputs), training=False)
        assert trace.collectives == (2 if world.size > 1 else 0), trace.by_name


def check_tables_of_any_placement_are_one_exchange(world):
    kinds = [sok.row_wise(), sok.row_wise(hash=True), sok.table_wise(0), sok.column_wise(3), sok.data_parallel()]
    tables = [sok.EmbeddingVariable(6, 50, name=f"placed_{i}", seed=1, placement=kind) for i, kind in enumerate(kinds)]
    dense, optimizer = tf.Variable(tf.ones([6])), sok.DistributedOptimizer(keras.optimizers.Adagrad(0.5))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            pooled = sok.group_embedding_lookup_sparse(tables, [ids] * len(tables), ["mean"] * len(tables))
            loss = tf.add_n([tf.reduce_mean(tf.square(p - dense)) for p in pooled])
        optimizer.apply_gradients(zip(tape.gradient(loss, [*tables, dense]), [*tables, dense], strict=True))

    lengths = [2, 0, 3] if world.rank else [3, 1, 1]
    for number in range(3):
        ids = tf.RaggedTensor.from_row_lengths(tf.range(5, dtype=tf.int64) + number * world.rank, lengths)
        with sok.trace() as trace:
            step(ids)
        # Three for all tables, and one for what is dense.
        assert trace.collectives == (4 if world.size > 1 else 0), trace.by_name
    rows = [table.sparse_read(tf.range(10, dtype=tf.int64)).numpy() for table in tables]
    for of_table in rows[1:]:
        np.testing.assert_allclose(of_table, rows[0], atol=1e-5)


def check_group_in_a_v1_session(world):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tables = make_tables("group_v1", 100, initializer="normal", way_home="sums")
        inputs = as_tensors(inputs_of(world))
        outputs = lookup_group(features_of(tables, inputs))
        loss = tf.add_n([tf.reduce_sum(o * i[3]) for o, i in zip(outputs, inputs, strict=True)])
        gradients = tf.gradients(loss, tables)
        train = sok.optimizers.SGD(1.0).apply_gradients(zip(gradients, tables, strict=True))
        session.run(tf.compat.v1.global_variables_initializer())
        found, _ = session.run([outputs, train])
        after = session.run([table.export() for table in tables])
    rows = [initial_rows(table) for table in tables]
    for output, expected in zip(found, expected_outputs(rows, inputs_of(world)), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    for (keys, values), row, gradient in zip(after, rows, expected_gradients(world), strict=True):
        keys = keys.astype(np.int64)
        np.testing.assert_allclose(row[keys] - values, gradient[keys], rtol=1e-4, atol=1e-5)


def check_what_python_refuses_on_one_rank_raises_on_all(world):
    tables = make_tables("group_refused", 100, initializer="normal")
    good = as_tensors(inputs_of(world))
    bad = list(good)
    bad[3] = (tf.constant([1.5, 2.5]), *good[3][1:])
    is_bad = world.rank == world.size - 1
    for _ in range(2):
        with pytest.raises(
            ValueError if is_bad else tf.errors.InvalidArgumentError, match="keys must be int32"
        ) as error:
            lookup_group(features_of(tables, bad if is_bad else good))
        assert is_bad or f"input of rank {world.size - 1}: ValueError" in str(error.value)
    assert len(lookup_group(features_of(tables, good))) == len(FEATURES)


def check_weights_of_wrong_length_on_one_rank_raise_on_all(world):
    tables = make_tables("group_weights", 100, initializer="normal")
    good = as_tensors(inputs_of(world))
    bad = list(good)
    bad[1] = (*good[1][:2], tf.ones([500]), good[1][3])
    run = tf.function(lambda inputs: lookup_group(features_of(tables, inputs)))
    for call in (run, lambda inputs: lookup_group(features_of(tables, inputs))):
        with pytest.raises(tf.errors.InvalidArgumentError, match="`weights` .*per key"):
            call(bad if world.rank == 0 else good)
        assert len(call(good)) == len(FEATURES)


def check_an_owner_that_cannot_answer_is_heard_by_all(world):
    """What only one rank finds out after collective 1: its peers wait for its rows, and get its words."""
    if world.size == 1:
        return
    tables = make_tables("group_broken", 100, initializer="normal")
    good = as_tensors(inputs_of(world))
    lookup_group(features_of(tables, good))
    name = tables[0].table_name
    if world.rank == 0:
        # Keys of another rank, as a peer with other ideas of ownership would send them.
        send = context.get_transport().all_to_all

        def misdeliver(x, splits, what):
            received, sizes = send(x, splits, what)
            words = received.numpy()
            words[7 + 3 * len(tables)] += 1  # the first key: docs/design/exchange.md has the layout
            return tf.constant(words), sizes

        transport = context.get_transport()
        transport.all_to_all = lambda x, splits, what: (misdeliver if what.endswith("keys") else send)(x, splits, what)
    keys = tf.constant([0], tf.int64)
    csr = Csr(keys, tf.constant([0, 1], tf.int64))
    features = [Feature(table, Csr(tf.cast(keys, table.key_dtype), csr.row_splits), "sum") for table in tables]
    try:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"rank 0 could not answer: table '{name}'.*belongs to"
        ):
            lookup_group(features)
    finally:
        if world.rank == 0:
            del transport.all_to_all
    assert len(lookup_group(features_of(tables, good))) == len(FEATURES)
