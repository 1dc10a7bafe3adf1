"""A training step on the GPU's kernels gives what it gives on the CPU."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import _ops
from sok.table import rules
from tests.sok.rule_cases import CASES

from .conftest import GPU

DIMS = (4, 7, 16)
COMBINERS = ("sum", "mean", "sqrtn")
BY_ROW = [name for name, rule in rules.RULES.items() if rule.needs_whole_row or any(s.scalar for s in rule.slots)]


def batches(seed, steps=4, keys=50, segments=10, high=300):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = [rng.integers(0, high, keys) for _ in DIMS]
        inner = [np.sort(rng.integers(0, keys + 1, segments - 1)) for _ in DIMS]
        yield [
            tf.RaggedTensor.from_row_splits(i, np.concatenate([[0], s, [keys]]))
            for i, s in zip(ids, inner, strict=True)
        ]


def train(device, optimizer, hashed, as_function, key_dtype=tf.int64):
    """The losses of some steps, and afterwards the rows of all keys."""
    with tf.device(device):
        tables = [
            sok.EmbeddingVariable(d, 1000, hashed=hashed, seed=d, key_dtype=key_dtype, name="device_table")
            for d in DIMS
        ]
        assert device.strip("/") in tables[0].handle.device

        def step(*ids):
            with tf.GradientTape() as tape:
                outputs = sok.group_embedding_lookup_sparse(tables, list(ids), list(COMBINERS))
                loss = tf.add_n([tf.reduce_sum(tf.square(o)) for o in outputs])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
            return loss

        call = tf.function(step) if as_function else step
        losses = [float(call(*(tf.cast(i, key_dtype) for i in ids))) for ids in batches(1)]
        rows = [sok.group_embedding_lookup([t], [tf.cast(tf.range(300), key_dtype)], training=False)[0] for t in tables]
        return losses, [r.numpy() for r in rows]


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "LazyAdam"])
def test_a_step_is_that_of_the_cpu(name, hashed, as_function):
    losses, rows = train(GPU, getattr(sok.optimizers, name)(0.1), hashed, as_function)
    expected_losses, expected_rows = train("/CPU:0", getattr(sok.optimizers, name)(0.1), hashed, as_function)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for row, expected in zip(rows, expected_rows, strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", BY_ROW)
def test_a_step_of_a_rule_that_looks_at_whole_rows_is_that_of_the_cpu(name):
    losses, rows = train(GPU, CASES[name].make(0.1), True, False)
    expected_losses, expected_rows = train("/CPU:0", CASES[name].make(0.1), True, False)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for row, expected in zip(rows, expected_rows, strict=True):
        np.testing.assert_allclose(row, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("key_dtype", [tf.int32, tf.uint32, tf.uint64])
def test_keys_of_every_type(key_dtype):
    losses, rows = train(GPU, sok.optimizers.SGD(0.1), True, False, key_dtype)
    expected_losses, expected_rows = train("/CPU:0", sok.optimizers.SGD(0.1), True, False, key_dtype)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    np.testing.assert_allclose(rows[0], expected_rows[0], rtol=1e-6)


def test_one_row_twice_in_a_gradient():
    results = []
    for device in ("/CPU:0", GPU):
        with tf.device(device):
            table = sok.EmbeddingVariable(3, 100, seed=1, name="twice")
            with tf.GradientTape() as tape:
                rows = sok.group_embedding_lookup([table], [tf.constant([5, 6, 5, 5], tf.int64)])[0]
                more = sok.lookup.lookup.lookup_rows(table, tf.constant([[6, 7]], tf.int64))
                loss = tf.reduce_sum(rows * rows) + tf.reduce_sum(more)
            gradient = tape.gradient(loss, table)
            sok.optimizers.SGD(0.5).apply_gradients([(gradient, table)])
            results.append(
                sok.lookup.lookup.lookup_rows(table, tf.constant([5, 6, 7, 8], tf.int64), training=False).numpy()
            )
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


def test_a_full_table_says_so_and_keeps_its_rows():
    with tf.device(GPU):
        table = sok.EmbeddingVariable(4, 10, name="full_on_gpu")
        before = sok.lookup.lookup.lookup_rows(table, tf.range(8, dtype=tf.int64))
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"full_on_gpu.*10"):
            sok.lookup.lookup.lookup_rows(table, tf.range(20, dtype=tf.int64))
        after = sok.lookup.lookup.lookup_rows(table, tf.range(8, dtype=tf.int64), training=False)
    np.testing.assert_array_equal(after, before)


TERMS = {
    "penalty": {"embeddings_regularizer": tf.keras.regularizers.L2(0.03)},
    "penalty of many kinds": {"embeddings_regularizer": tf.keras.regularizers.L1L2(0.02, 0.03)},
    "exact penalty": {"embeddings_regularizer": tf.keras.regularizers.L2(0.03), "regularize": "exact"},
    "constraint": {"embeddings_constraint": tf.keras.constraints.MaxNorm(0.1, axis=1)},
    "both": {
        "embeddings_regularizer": tf.keras.regularizers.L2(0.03),
        "embeddings_constraint": tf.keras.constraints.NonNeg(),
    },
}


def train_with_terms(device, optimizer, **terms):
    """Rows of all keys after steps that look some keys up twice, and others not; the penalties that were told."""
    with tf.device(device):
        normal = tf.keras.initializers.RandomNormal(stddev=0.1, seed=3)
        layer = sok.Embedding(40, 6, normal, sparse_as_dense_size=0, **terms)
        layer.build([None, 3])
        table = layer.embedding_variable
        assert device.strip("/") in table.handle.device

        @tf.function
        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return tf.add_n(layer.losses) if layer.losses else loss

        rng = np.random.default_rng(2)
        told = [float(step(tf.constant(rng.integers(0, 40, [5, 3])))) for _ in range(4)]
        return told, layer.get_weights()[0]


@pytest.mark.parametrize(
    ("terms", "name"),
    [(terms, "SGD") for terms in TERMS] + [(terms, "Adam") for terms in TERMS if "exact" not in terms],
)
def test_penalties_and_constraints_act_as_on_the_cpu(terms, name):
    (told, rows), (expected_told, expected) = (
        train_with_terms(device, getattr(sok.optimizers, name)(0.1), **TERMS[terms]) for device in (GPU, "/CPU:0")
    )
    np.testing.assert_allclose(told, expected_told, rtol=1e-5)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-7)
    _, free = train_with_terms(GPU, getattr(sok.optimizers, name)(0.1))
    assert np.abs(rows - free).max() > 1e-3


def test_rows_that_a_constraint_changed_belong_to_the_next_save(tmp_path):
    lib = _ops.lib()
    with tf.device(GPU):
        table = sok.EmbeddingVariable(2, 10, name="noted", initializer="ones")
        table.assign(tf.constant([1, 2, 3], tf.int64), tf.ones([3, 2]))
        sok.save(tmp_path, table, incremental=True)
        _, row_ids = lib.sok_table_lookup(table.handle, tf.constant([2, 9], tf.int64), False, dim=2)
        lib.sok_table_scatter(table.handle, row_ids, tf.constant([[5.0, 6.0], [7.0, 8.0]]), dim=2)
        np.testing.assert_array_equal(lib.sok_table_gather(table.handle, row_ids, dim=2), [[5, 6], [0, 0]])
        sok.save(tmp_path, table, incremental=True)
        table.assign(tf.constant([2], tf.int64), tf.zeros([1, 2]))
        sok.restore(tmp_path, table)
        keys, rows = table.export()
    assert dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True)) == {1: [1, 1], 2: [5, 6], 3: [1, 1]}
