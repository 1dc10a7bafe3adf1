"""Group lookups in float64 and in mixed precision: against TensorFlow."""

import keras
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


def ids_as(form):
    ids = tf.ragged.constant(ROWS, dtype=tf.int64, ragged_rank=1)
    return ids if form == "ragged" else ids.to_sparse()


def with_values(ids, values):
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_values(values)
    return tf.SparseTensor(ids.indices, values, ids.dense_shape)


@pytest.mark.parametrize("form", ["ragged", "sparse", "sparse_unordered"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_weights_of_float64_keep_their_digits(call, combiner, form):
    variable = tf.Variable(np.random.default_rng(1).normal(size=(10, 3)))
    ids = ids_as(form.partition("_")[0])
    weights = tf.Variable(np.random.default_rng(2).uniform(0.5, 2, 6))
    order = [4, 2, 0, 5, 3, 1] if form == "sparse_unordered" else range(6)

    def ours():
        given = with_values(ids, weights.read_value())
        of_ids = ids
        if form == "sparse_unordered":
            of_ids, given = (
                tf.SparseTensor(tf.gather(s.indices, order), tf.gather(s.values, order), s.dense_shape)
                for s in (ids, given)
            )
        return sok.group_embedding_lookup_sparse([variable], [of_ids], combiner, sp_weights=[given])[0]

    def stock():
        sparse = ids_as("sparse")
        pooled = tf.nn.embedding_lookup_sparse(variable, sparse, with_values(sparse, weights), combiner=combiner)
        return tf.pad(pooled, [[0, 5 - tf.shape(pooled)[0]], [0, 0]])

    def step(lookup):
        with tf.GradientTape() as tape:
            output = lookup()
            loss = tf.reduce_sum(output**2)
        return output, *map(tf.convert_to_tensor, tape.gradient(loss, [variable, weights]))

    for found, expected in zip(call(lambda: step(ours)), step(stock), strict=True):
        assert found.dtype == tf.float64
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


class Embeddings(keras.layers.Layer):
    """Pools by `lookup`, under the layer's own policy."""

    def __init__(self, lookup, **options):
        super().__init__(**options)
        self.lookup = lookup
        self.tables = [
            self.add_weight(shape=[10, dim], initializer=keras.initializers.RandomNormal(stddev=1.0, seed=dim))
            for dim in (3, 16)
        ]

    def call(self, weights):
        return self.lookup(self.tables, [ids_as("sparse")] * 2, weights if weights.shape[0] else None)


def our_lookup(tables, ids, weights):
    given = None if weights is None else [with_values(i, weights) for i in ids]
    pooled = sok.group_embedding_lookup_sparse(tables, ids, ["sum", "mean"], sp_weights=given)
    return [*pooled, *sok.group_embedding_lookup(tables, [[1], [[2]]])]


def stock_lookup(tables, ids, weights):
    outputs = []
    for table, sparse, combiner in zip(tables, ids, ("sum", "mean"), strict=True):
        given = None if weights is None else with_values(sparse, weights)
        pooled = tf.nn.embedding_lookup_sparse(tf.convert_to_tensor(table), sparse, given, combiner=combiner)
        outputs.append(tf.pad(pooled, [[0, 5 - tf.shape(pooled)[0]], [0, 0]]))
    return [*outputs, *(tf.gather(tf.convert_to_tensor(t), i) for t, i in zip(tables, ([1], [[2]]), strict=True))]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_variables_of_keras_3_in_mixed_precision(call, policy, weighted):
    weights = tf.range(1.0, 7.0) / 4 if weighted else None

    def step(layer):
        with tf.GradientTape() as tape:
            outputs = layer(tf.zeros([0]) if weights is None else weights)
            loss = tf.add_n([tf.reduce_sum(tf.cast(o, tf.float32) ** 2) for o in outputs])
        return outputs, [tf.convert_to_tensor(g) for g in tape.gradient(loss, [w.value for w in layer.tables])]

    layers = [Embeddings(lookup, dtype=policy) for lookup in (our_lookup, stock_lookup)]
    (outputs, gradients), (expected, of_stock) = call(lambda: step(layers[0])), step(layers[1])
    # Stock TensorFlow rounds each row and adds them then; ours are added and then rounded.
    tolerance = {"mixed_bfloat16": 2.0**-6, "mixed_float16": 2.0**-9, "float32": 1e-6}[policy]
    for found, wanted in zip(outputs, expected, strict=True):
        assert found.dtype == wanted.dtype == layers[0].compute_dtype
        np.testing.assert_allclose(
            tf.cast(found, tf.float32), tf.cast(wanted, tf.float32), atol=tolerance, rtol=tolerance
        )
    for found, wanted in zip(gradients, of_stock, strict=True):
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, wanted, atol=8 * tolerance, rtol=8 * tolerance)
    # What was added in 32 bits and rounded once.
    given = None if weights is None else tf.cast(tf.cast(weights, layers[0].compute_dtype), tf.float32)
    exact = our_lookup([w.value for w in layers[0].tables], [ids_as("sparse")] * 2, given)
    for found, unrounded in zip(outputs, exact, strict=True):
        np.testing.assert_array_equal(found, tf.cast(unrounded, found.dtype))


def test_a_variable_of_keras_3_without_a_value_of_its_own_is_refused():
    variable = keras.Variable(np.zeros([4, 2], np.float32))
    with (
        keras.StatelessScope(state_mapping=[(variable, tf.zeros([4, 2]))]),
        pytest.raises(TypeError, match=saying("`params[0]`", "sok.EmbeddingVariable or a tf.Variable")),
    ):
        sok.group_embedding_lookup_sparse([variable], [ids_as("ragged")])
