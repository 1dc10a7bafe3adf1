"""Weights of ids that are trained themselves (attention): their gradient reads rows as they were before the step."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.reference.judge import assert_close

v1 = tf.compat.v1
_numbers = itertools.count()
VALUES = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int64)
SPLITS = np.array([0, 4, 4, 7, 8, 8], np.int64)
RATE = 0.5


def make_tables():
    number = next(_numbers)
    return [sok.EmbeddingVariable(dim, 20, name=f"trained_weights_{number}_{dim}", seed=dim) for dim in (3, 5)]


def loss_of(tables, weights):
    ids = tf.RaggedTensor.from_row_splits(VALUES, SPLITS)
    weighted = ids.with_values(weights)
    outputs = sok.group_embedding_lookup_sparse(
        [tables[0], tables[1], tables[0]], [ids] * 3, ["sum", "mean", "sqrtn"], sp_weights=[None, weighted, weighted]
    )
    return tf.add_n([tf.reduce_sum(output**2) for output in outputs])


def expected(rows, weights):
    """Stock TensorFlow's gradient of the weights, and what a step of SGD leaves of the rows of VALUES."""
    segments = np.repeat(np.arange(len(SPLITS) - 1), np.diff(SPLITS))
    dense = [tf.Variable(r) for r in rows]
    weights = tf.Variable(weights)

    def total(x):
        return tf.math.unsorted_segment_sum(x, segments, len(SPLITS) - 1)

    with tf.GradientTape() as tape:
        first, second = (tf.gather(d, VALUES) for d in dense)
        w = weights[:, None]
        outputs = [
            total(first),
            tf.math.divide_no_nan(total(second * w), total(w)),
            tf.math.divide_no_nan(total(first * w), tf.sqrt(total(w * w))),
        ]
        loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs])
    of_rows, of_weights = tape.gradient(loss, [dense, weights])
    for d, slices in zip(dense, of_rows, strict=True):
        d.scatter_sub(tf.IndexedSlices(RATE * slices.values, slices.indices))
    return of_weights.numpy(), [d.numpy() for d in dense]


@pytest.mark.parametrize("mode", ["eager", "function", "tape outside"])
def test_gradient_and_step(mode, rng):
    tables, rule = make_tables(), sok.optimizers.SGD(RATE)
    weights = tf.constant(rng.uniform(0.5, 2, len(VALUES)).astype(np.float32))
    before = [t.sparse_read(tf.range(10, dtype=tf.int64)).numpy() for t in tables]
    wanted, after = expected(before, weights.numpy())
    forward = tf.function(loss_of) if mode == "tape outside" else loss_of

    def step(weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = forward(tables, weights)
        of_rows, of_weights = tape.gradient(loss, [tables, weights])
        rule.apply_gradients(zip(of_rows, tables, strict=True))
        return of_weights

    got = (tf.function(step) if mode == "function" else step)(weights)
    assert_close(got, wanted, scale=10)
    for t, rows in zip(tables, after, strict=True):
        assert_close(t.sparse_read(VALUES), rows[VALUES], scale=10)


def test_the_gradient_of_a_v1_step_does_not_see_its_update(rng):
    start = rng.uniform(0.5, 2, len(VALUES)).astype(np.float32)
    for _ in range(5):  # an order that is not enforced goes right most of the time
        with tf.Graph().as_default(), v1.Session() as session:
            tables = make_tables()
            weights = v1.get_variable("weights", initializer=start)
            reads = [t.sparse_read(tf.constant(VALUES)) for t in tables]
            whole = [t.sparse_read(tf.range(10, dtype=tf.int64)) for t in tables]
            loss = loss_of(tables, weights + 0.0)
            gradients = tf.gradients(loss, [*tables, weights])
            train = sok.optimizers.SGD(RATE).apply_gradients(zip(gradients[:2], tables, strict=True))
            session.run(v1.global_variables_initializer())
            before = session.run(whole)
            got, _ = session.run([gradients[2], train])
            after = session.run(reads)
        wanted, rows = expected(before, start)
        assert_close(got, wanted, scale=10)
        for found, r in zip(after, rows, strict=True):
            assert_close(found, r[VALUES], scale=10)


def test_weights_that_nobody_asks_for_cost_nothing():
    (table, _) = make_tables()
    ids = tf.RaggedTensor.from_row_splits(VALUES, SPLITS)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            (output,) = sok.group_embedding_lookup_sparse(
                [table], [ids], "mean", sp_weights=[ids.with_values(tf.ones(8))]
            )
            loss = tf.reduce_sum(output)
        return tape.gradient(loss, table).values

    graph = step.get_concrete_function().graph
    assert "Sok>GroupLookupGradWeights" not in {op.type for op in graph.get_operations()}
