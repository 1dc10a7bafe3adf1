"""Tables that each worker has a copy of, beside others: what travels of them, and what they learn."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group
from tests.multiprocess.harness import World
from tests.ops.tables import fresh_rows
from tests.reference import combine as reference
from tests.reference.exchange import ANSWER_HEADER

SEGMENTS, NUM_KEYS, STEPS = 5, 15, 2
TABLES = [(3, True), (2, False), (5, True)]  # width, and whether each worker has a copy
# (table, combiner, weighted): what may come by sums, and what may not.
FEATURES = [
    (2, "mean", False),
    (0, "sum", False),
    (1, "sqrtn", False),
    (0, "mean", True),
    (2, "rows", False),
    (1, "sum", True),
]


def inputs_of(rank, size, step):
    """Keys, splits, weights and upstream gradients of each feature; one worker has no keys, in each step another."""
    rng = np.random.default_rng([rank, step])
    inputs = []
    for table, combiner, weighted in FEATURES:
        lengths = rng.integers(0, 4, SEGMENTS + rank) * (size == 1 or rank != step % size)
        keys = rng.integers(0, NUM_KEYS, lengths.sum())
        outputs = len(keys) if combiner == "rows" else len(lengths)
        inputs.append((
            keys,
            np.concatenate([[0], np.cumsum(lengths)]),
            rng.uniform(0.5, 2, len(keys)).astype(np.float32) if weighted else None,
            rng.normal(size=(outputs, TABLES[table][0])).astype(np.float32),
        ))  # fmt: skip
    return inputs


def make_tables(name, **options):
    return [
        sok.EmbeddingVariable(
            dim,
            100,
            name=f"{name}_{t}",
            seed=t,
            initializer="normal",
            placement=sok.data_parallel() if copied else sok.row_wise(),
            **options,
        )
        for t, (dim, copied) in enumerate(TABLES)
    ]


def features_of(tables, inputs):
    return [
        Feature(tables[table], Csr(keys, None if combiner == "rows" else splits, weights), combiner)
        for (table, combiner, _), (keys, splits, weights, _) in zip(FEATURES, inputs, strict=True)
    ]


def as_tensors(inputs):
    return [tuple(None if x is None else tf.constant(x) for x in of_feature) for of_feature in inputs]


def trainer(tables):
    """A step of SGD: from inputs to outputs, and gradients in weights."""
    optimizer = sok.optimizers.SGD(0.25)

    def train(inputs):
        weights = [w for _, _, w, _ in inputs if w is not None]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = lookup_group(features_of(tables, inputs))
            loss = tf.add_n([tf.reduce_sum(o * i[3]) for o, i in zip(outputs, inputs, strict=True)])
        of_tables, of_weights = tape.gradient(loss, [tables, weights])
        optimizer.apply_gradients(zip(of_tables, tables, strict=True))
        return outputs, of_weights

    return train


def expected_outputs(rows, inputs):
    """By NumPy: outputs, and gradients in weights."""
    outputs, of_weights = [], []
    for (table, combiner, weighted), (keys, splits, weights, upstream) in zip(FEATURES, inputs, strict=True):
        if combiner == "rows":
            outputs.append(rows[table][keys])
        else:
            outputs.append(reference.combine(rows[table], keys, splits, weights, combiner))
        if weighted:
            of_weights.append(reference.combine_grad_weights(upstream, rows[table], keys, splits, weights, combiner))
    return outputs, of_weights


def expected_gradients(size, step):
    """Of each key of each table, summed over the ranks."""
    sums = [np.zeros([NUM_KEYS, dim]) for dim, _ in TABLES]
    for rank in range(size):
        for (table, combiner, _), (keys, splits, weights, upstream) in zip(
            FEATURES, inputs_of(rank, size, step), strict=True
        ):
            if combiner == "rows":
                np.add.at(sums[table], keys, upstream)
            else:
                sums[table] += reference.combine_grad_rows(upstream, keys, splits, weights, NUM_KEYS, combiner)
    return sums


def floats_of(rank, size, step, way, owner):
    """What one worker asks of another, as (floats of copies, other floats): rows that are read, or partial sums."""
    by_rows, found = [set() for _ in TABLES], [0, 0]
    for (table, combiner, weighted), (keys, splits, _, _) in zip(FEATURES, inputs_of(rank, size, step), strict=True):
        dim, copied = TABLES[table]
        mine = np.ones(len(keys), bool) if copied else keys % size == owner
        if way == "rows" or combiner == "rows" or weighted:
            by_rows[table] |= set(keys[mine].tolist())
        else:
            found[not copied] += dim * sum(mine[part].any() for part in reference.segments(splits))
    for (dim, copied), keys in zip(TABLES, by_rows, strict=True):
        found[not copied] += dim * len(keys)
    return found


def bytes_by_kind(trace):
    found = dict.fromkeys(("keys", "rows", "grads"), 0)
    for name, entry in trace.by_name.items():
        found[name.split("/")[2]] += entry["bytes"]
    return found


def check_rows_of_copies_do_not_travel(world: World) -> None:
    """And what is learnt is what NumPy learns of all batches: on all workers the same, to the bit."""
    for way, in_function in itertools.product(("rows", "sums"), (False, True)):
        tables = make_tables(f"stays_{way}_{in_function}", way_home=way)
        rows = [
            fresh_rows(range(NUM_KEYS), t.seed, t._initializer_spec, t.dim, t.key_dtype).astype(np.float64)
            for t in tables
        ]
        train = trainer(tables)
        train = tf.function(train, reduce_retracing=True) if in_function else train
        for step in range(STEPS):
            inputs = inputs_of(world.rank, world.size, step)
            with sok.trace() as trace:
                found = train(as_tensors(inputs))
            for mine, expected in zip(found, expected_outputs(rows, inputs), strict=True):
                for one, other in zip(mine, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
            for table, gradients in zip(rows, expected_gradients(world.size, step), strict=True):
                table -= 0.25 * gradients
            if world.size == 1:
                continue
            assert trace.collectives == 3, trace.by_name
            asked = {
                (asker, owner): floats_of(asker, world.size, step, way, owner)
                for asker in range(world.size)
                for owner in range(world.size)
            }
            home = asked[world.rank, world.rank][0] + sum(asked[r, world.rank][1] for r in range(world.size))
            back = sum(sum(asked[world.rank, r]) for r in range(world.size))
            moved = bytes_by_kind(trace)
            assert moved["rows"] == 4 * (ANSWER_HEADER * world.size + home)
            assert moved["grads"] == 4 * (ANSWER_HEADER * world.size + back)
        for table, expected, (_, copied) in zip(tables, rows, TABLES, strict=True):
            keys, after = (x.numpy() for x in table.export())
            np.testing.assert_allclose(after, expected[keys], rtol=1e-4, atol=1e-5)
            if copied and world.size > 1:
                # Made in one order, too.
                of_all = context.get_transport().all_gather(
                    tf.concat([after, keys[:, None].astype(np.float32)], 1), f"copies/{table.table_name}"
                )
                for of_rank in np.split(of_all.numpy(), world.size):
                    np.testing.assert_array_equal(of_rank[:, :-1], after)
                    np.testing.assert_array_equal(of_rank[:, -1], keys)


def check_reading_copies_moves_nothing_and_makes_nothing(world: World) -> None:
    tables = make_tables("read", way_home="rows")
    keys = tf.constant([3, 9, 3], tf.int64)
    features = [Feature(t, Csr(keys)) for t in tables if t.placement.is_copied]
    with sok.trace() as trace:
        found = lookup_group(features, training=False)
    for rows, feature in zip(found, features, strict=True):
        t = feature.table
        expected = fresh_rows([3, 9, 3], t.seed, t._initializer_spec, t.dim, t.key_dtype)
        np.testing.assert_array_equal(rows, expected)
        assert len(t.export()[0]) == 0
    if world.size > 1:
        own = 2 * sum(dim for dim, copied in TABLES if copied)
        assert bytes_by_kind(trace)["rows"] == 4 * (ANSWER_HEADER * world.size + own)


def check_a_copy_that_is_full_stops_all(world: World) -> None:
    """One worker's copy alone has no room, though no other worker wants rows of it."""
    if world.size == 1:
        return
    table = sok.EmbeddingVariable(2, 10, name="full_copy", placement=sok.data_parallel(), initializer="ones")
    optimizer = sok.optimizers.SGD(1.0)

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_group([Feature(table, Csr(keys))])[0])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    if world.rank == 0:
        table.assign(np.arange(100, 110), np.ones([10, 2], np.float32))
    context.get_transport().barrier("sok/full_copy")
    for run in (step, tf.function(step)):
        with pytest.raises(tf.errors.ResourceExhaustedError, match="(?s)rank 0 could not answer.*full_copy"):
            run(tf.constant([0, 100], tf.int64))
    keys, rows = (x.numpy() for x in table.export())
    assert sorted(keys.tolist()) == (list(range(100, 110)) if world.rank == 0 else [0, 100])
    np.testing.assert_array_equal(rows, np.ones_like(rows))


def check_copies_in_a_v1_session(world: World) -> None:
    inputs = inputs_of(world.rank, world.size, 0)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tables = make_tables("copies_v1", way_home="sums")
        outputs, of_weights = [], []
        tensors = as_tensors(inputs)
        outputs = lookup_group(features_of(tables, tensors))
        loss = tf.add_n([tf.reduce_sum(o * i[3]) for o, i in zip(outputs, tensors, strict=True)])
        weights = [w for _, _, w, _ in tensors if w is not None]
        gradients = tf.gradients(loss, [*tables, *weights])
        train = sok.optimizers.SGD(0.25).apply_gradients(zip(gradients[: len(tables)], tables, strict=True))
        session.run(tf.compat.v1.global_variables_initializer())
        found, of_weights, _ = session.run([outputs, gradients[len(tables) :], train])
        after = session.run([table.export() for table in tables])
    rows = [fresh_rows(range(NUM_KEYS), t.seed, t._initializer_spec, t.dim, t.key_dtype) for t in tables]
    for mine, expected in zip((found, of_weights), expected_outputs(rows, inputs), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    for (keys, values), row, gradient in zip(after, rows, expected_gradients(world.size, 0), strict=True):
        np.testing.assert_allclose(row[keys] - values, 0.25 * gradient[keys], rtol=1e-4, atol=1e-5)
