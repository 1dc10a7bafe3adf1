"""Gradients through what TensorFlow has around a lookup: custom gradients, loops, recomputation, Jacobians."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows

KEYS = tf.constant([3, 5, 5], tf.int64)


def table_of(kind):
    if kind == "table":
        return sok.EmbeddingVariable(2, 10, name="around", initializer="ones")
    return sok.Variable(np.ones([10, 2], np.float32))


def run(function, mode):
    return tf.function(function)() if mode == "graph" else function()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["table", "variable"])
def test_a_custom_gradient_of_a_lookup_is_that_of_the_table(kind, mode):
    table = table_of(kind)

    @tf.custom_gradient
    def doubled(x):
        with tf.GradientTape() as inner:
            loss = x * tf.reduce_sum(lookup_rows(table, KEYS) ** 2)
        rows = inner.gradient(loss, table)

        def grad(upstream, variables):
            assert variables[0] is table
            return upstream, [tf.IndexedSlices(2.0 * upstream * rows.values, rows.indices)]

        return loss, grad

    def gradients():
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = 3.0 * doubled(x)
        return loss, tape.gradient(loss, [x, table])

    loss, (of_x, of_table) = run(gradients, mode)
    assert (float(loss), float(of_x)) == (18.0, 3.0)
    sok.optimizers.SGD(1.0).apply_gradients([(of_table, table)])
    np.testing.assert_array_equal(lookup_rows(table, [3, 5]), [[1.0 - 12.0] * 2, [1.0 - 24.0] * 2])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_custom_gradient_of_the_vectors_is_applied(mode):
    table = table_of("table")
    reverse = tf.custom_gradient(lambda x: (tf.identity(x), lambda upstream: -upstream))

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(reverse(lookup_rows(table, KEYS)))
        return tape.gradient(loss, table)

    np.testing.assert_array_equal(run(gradient, mode).values, -np.ones([3, 2]))


def test_a_function_with_a_custom_gradient_reads_no_table_as_a_matrix():
    table = table_of("table")
    with pytest.raises(TypeError, match="is not a dense matrix"):
        tf.custom_gradient(lambda x: (x + tf.reduce_sum(table.value()), lambda upstream: upstream))(tf.constant(1.0))


def loop(table):
    def body(i, total):
        return i + 1, total + tf.reduce_sum(lookup_rows(table, KEYS))

    return tf.while_loop(lambda i, _: i < 3, body, (0, 0.0))[1]


def recomputed(table):
    return tf.recompute_grad(lambda x: x * tf.reduce_sum(lookup_rows(table, KEYS)))(tf.constant(1.0))


@pytest.mark.parametrize(
    ("call", "mode", "remedy"),
    [
        (loop, "graph", "tf.while_loop does.*look up before the loop"),
        (recomputed, "eager", "tf.recompute_grad does: look up outside"),
        (recomputed, "graph", "tf.recompute_grad does: look up outside"),
    ],
)
def test_what_needs_a_matrix_of_all_rows_says_what_to_do(call, mode, remedy):
    table = table_of("table")

    def gradient():
        with tf.GradientTape() as tape:
            loss = call(table)
        return tape.gradient(loss, table)

    with pytest.raises(Exception, match=rf"(?s)matrix of all rows.*{remedy}"):
        run(gradient, mode)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_jacobian_is_taken_in_the_vectors(mode):
    table = table_of("table")

    def jacobian(in_vectors):
        with tf.GradientTape() as tape:
            rows = lookup_rows(table, KEYS)
            if in_vectors:
                tape.watch(rows)
            result = tf.reduce_sum(rows**2, 1)
        return tape.jacobian(result, rows if in_vectors else table)

    with pytest.raises(Exception, match=r"(?s)matrix of all rows.*tape.jacobian.*in the vectors"):
        run(lambda: jacobian(False), mode)
    assert run(lambda: jacobian(True), mode).shape == [3, 3, 2]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_remedies_work(mode):
    table = table_of("table")

    def gradient():
        with tf.GradientTape() as tape:
            rows = lookup_rows(table, KEYS)
            total = tf.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, s + tf.reduce_sum(rows)), (0, 0.0))[1]
            total += tf.recompute_grad(lambda vectors: tf.reduce_sum(vectors**2))(rows)
        return tape.gradient(total, table)

    np.testing.assert_array_equal(run(gradient, mode).values, np.full([3, 2], 5.0))
