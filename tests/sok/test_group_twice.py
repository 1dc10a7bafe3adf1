"""Group lookups that are differentiated twice: in ordinary variables against a matrix product, in tables an error."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.messages import saying

COMBINERS = ("sum", "mean", "sqrtn")
ROWS = [[3, 1, 4], [], [1, 5], [9], []]


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init()


def make_ids():
    return tf.ragged.constant(ROWS, dtype=tf.int64, ragged_rank=1)


@pytest.mark.parametrize("combiner", [*COMBINERS, "rows"])
def test_second_derivatives_of_variables_are_those_of_a_matrix_product(call, combiner):
    variables = [tf.Variable(np.random.default_rng(d).normal(size=(10, d)).astype(np.float32)) for d in (2, 5)]
    ids = make_ids()
    # Which part of each row goes into each output, as a matrix.
    parts = np.zeros([6 if combiner == "rows" else 5, 10], np.float32)
    for sample, row in enumerate(ROWS):
        for place, i in enumerate(row):
            if combiner == "rows":
                parts[sum(map(len, ROWS[:sample])) + place, i] = 1
            else:
                parts[sample, i] = {"sum": 1, "mean": 1 / len(row), "sqrtn": len(row) ** -0.5}[combiner]

    def ours():
        if combiner == "rows":
            return sok.group_embedding_lookup(variables, [ids.values] * 2)
        return sok.group_embedding_lookup_sparse(variables, [ids] * 2, combiner)

    def step(lookup):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.add_n([tf.reduce_sum(o**3) for o in lookup()])
            gradients = [tf.convert_to_tensor(g) for g in inner.gradient(loss, variables)]
            penalty = tf.add_n([tf.reduce_sum(g**2) for g in gradients])
        return [tf.convert_to_tensor(g) for g in outer.gradient(penalty, variables)]

    expected = step(lambda: [tf.matmul(parts, v) for v in variables])
    for found, wanted in zip(call(lambda: step(ours)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_table_is_not_differentiated_again():
    table = sok.EmbeddingVariable(2, 10, name="only_once", initializer="ones")
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            (output,) = sok.group_embedding_lookup_sparse([table], [make_ids()], "sum")
            loss = tf.reduce_sum(output**3)
        penalty = tf.reduce_sum(inner.gradient(loss, table).values ** 2)
    with pytest.raises(LookupError, match=saying("Sok>GroupLookupGrad", "gradient", "a second time")):
        outer.gradient(penalty, table)
    # What the message says to do.
    with tf.GradientTape() as outer:
        (output,) = sok.group_embedding_lookup_sparse([table], [make_ids()], "sum")
        with tf.GradientTape() as inner:
            inner.watch(output)
            loss = tf.reduce_sum(output**3)
        penalty = tf.reduce_sum(inner.gradient(loss, output) ** 2)
    assert float(tf.reduce_sum(outer.gradient(penalty, table).values)) == pytest.approx(
        sum(2 * len(row) * 36 * len(row) ** 3 for row in ROWS)
    )
