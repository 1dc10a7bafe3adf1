"""Lookups said in stock ops give what the native ops give, whatever the input."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.base import _ops
from sok.job import context
from sok.lookup import lookup
from sok.lookup.feature import Csr, Feature
from sok.lookup.inputs import to_csr
from sok.saved_model.frozen_table import FrozenTable, word_dtype
from sok.saved_model.initial_rows import initial_rows
from sok.saved_model.signatures import flat_function, served_by
from sok.saved_model.stock_ops import StockOps
from tests.reference import initial_values
from tests.reference.keys import extreme_keys

KEYS = st.one_of(st.integers(-3, 8), st.sampled_from(extreme_keys(np.int64).tolist()))
SEGMENTS = st.lists(st.lists(st.tuples(KEYS, st.floats(0.125, 4, width=32)), max_size=4), max_size=5)


def freeze(table):
    frozen = FrozenTable(table, tf.float32, None)
    keys, rows = table.export()
    order = tf.argsort(tf.bitcast(keys, word_dtype(table)))
    frozen.keys.assign(tf.gather(tf.bitcast(keys, word_dtype(table)), order))
    frozen.rows.assign(tf.gather(rows, order))
    return frozen


@pytest.fixture(scope="module")
def tables():
    context.get_transport()
    wide = sok.EmbeddingVariable(3, 100, name="stock_wide", initializer="uniform")
    narrow = sok.EmbeddingVariable(1, 100, name="stock_narrow", initializer="normal")
    rng = np.random.default_rng(5)
    for table in (wide, narrow):
        keys = np.array([-3, 0, 2, 5, 2**63 - 1, -(2**63)])
        table.assign(keys, rng.normal(size=(len(keys), table.dim)))
    return wide, narrow


def csr_of(segments, weighted):
    flat = [pair for segment in segments for pair in segment]
    splits = np.cumsum([0, *map(len, segments)])
    weights = tf.constant([w for _, w in flat], tf.float32) if weighted else None
    return Csr(tf.constant([k for k, _ in flat], tf.int64), tf.constant(splits, tf.int64), weights)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SEGMENTS, st.booleans(), st.sampled_from(["sum", "mean", "sqrtn"])), min_size=1, max_size=3))
def test_a_group_pools_alike(tables, features):
    asked = [
        Feature(tables[i % 2], csr_of(s, weighted), combiner) for i, (s, weighted, combiner) in enumerate(features)
    ]
    expected = lookup.lookup_group(asked, training=False)
    with _ops.substituted(StockOps(freeze)):
        actual = lookup.lookup_group(asked, training=False)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), KEYS), max_size=8, unique_by=lambda x: x[:2]),
    st.booleans(),
)
def test_sparse_inputs_in_any_order_become_the_same_segments(tables, entries, weighted):
    indices = tf.constant([e[:2] for e in entries], tf.int64, shape=[len(entries), 2])
    ids = tf.SparseTensor(indices, tf.constant([e[2] for e in entries], tf.int64), [5, 4])
    weights = ids.with_values(tf.range(len(entries), dtype=tf.float32)) if weighted else None
    feature = Feature(tables[0], ids, "sum", weights)
    expected = to_csr(feature)
    with _ops.substituted(StockOps(freeze)):
        actual = to_csr(feature)
    for part in ("keys", "row_splits", "weights"):
        if getattr(expected, part) is not None:
            np.testing.assert_array_equal(getattr(actual, part), getattr(expected, part))


@pytest.mark.parametrize("kind", ["constant", "uniform", "normal", "truncated_normal", "bank"])
@pytest.mark.parametrize("dim", [1, 4, 7])
def test_initial_rows_are_those_of_the_reference(rng, kind, dim):
    bank = rng.normal(size=(5, dim)).astype(np.float32)
    spec = sok.table.initializers.InitializerSpec(
        kind, -1.5, 0.75, tuple(bank.ravel().tolist()) if kind == "bank" else ()
    )
    keys, seed = extreme_keys(np.int64), -(2**63) + 12345
    expected = initial_values.initial_rows(initial_values.Initializer(kind, -1.5, 0.75, bank), seed, keys, dim)
    actual = initial_rows(spec, tf.constant(seed, tf.int64), tf.constant(keys), dim)
    tolerance = 0 if kind in initial_values.EXACT else 0.75 * initial_values.TOLERANCE
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    assert initial_rows(spec, tf.constant(seed, tf.int64), tf.zeros([0], tf.int64), dim).shape == (0, dim)


def test_inputs_have_the_names_they_are_given_by():
    def names(model, signatures=None):
        return [list(flat_function(served)[1]) for served in served_by(model, signatures).values()]

    z, a = keras.Input((3,), name="tensor-1"), keras.Input((2,), name="tensor-2")
    y = keras.layers.Concatenate()([z, a])
    with pytest.warns(UserWarning, match="must match the names"):
        assert names(keras.Model({"z": z, "a": a}, y)) == [["a", "z"]]
    assert names(keras.Model([z, a], y)) == [["tensor_1", "tensor_2"]]
    dense, ragged = tf.TensorSpec([None]), tf.RaggedTensorSpec([None, None, None, 2], tf.int64, ragged_rank=2)
    sparse = tf.SparseTensorSpec([None, 4])
    model = lambda x: x  # noqa: E731
    assert names(model, dense) == [["inputs"]]
    assert names(model, tf.TensorSpec([None], name="a/b c:0")) == [["a_b_c"]]
    assert names(model, {"b": dense, "a": [sparse, dense]}) == [
        ["a_0_indices", "a_0_values", "a_0_dense_shape", "a_1", "b"]
    ]
    assert names(model, [ragged, dense]) == [
        ["inputs_0_values", "inputs_0_row_splits_0", "inputs_0_row_splits_1", "inputs_1"]
    ]
    assert names(None, {"f": (lambda left, right: left, (dense, sparse))}) == [
        ["left", "right_indices", "right_values", "right_dense_shape"]
    ]
    with pytest.raises(ValueError, match="must have different names"):
        names(model, [tf.TensorSpec([None], name="x"), tf.TensorSpec([None], name="x")])
