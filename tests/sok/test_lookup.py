"""Lookups on one worker and, with threads for workers, on several: rows, pooled vectors, gradients, errors."""

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from sok.lookup.feature import Csr
from sok.lookup.lookup import lookup_rows
from sok.table.table import EmbeddingVariable
from tests.group_features import lookup_pooled
from tests.reference import combine as reference
from tests.reference.judge import assert_close, assert_same, assert_same_table
from tests.sok.threads_world import checked, run_world

_numbers = itertools.count()
COMBINERS = ["sum", "mean", "sqrtn"]
DTYPES = [tf.int64, tf.int32, tf.uint32, tf.uint64]
DIM = 3


def table(name=None, capacity=200, **kwargs) -> EmbeddingVariable:
    return EmbeddingVariable(DIM, capacity, name=name or f"test_lookup_{next(_numbers)}", **kwargs)


def random_csr(rng, segments, key_dtype=tf.int64, weighted=False, keys=30):
    """Segments of 0 to 3 keys, of which many are equal."""
    lengths = rng.integers(0, 4, segments)
    n = int(lengths.sum())
    return Csr(
        tf.constant(rng.integers(0, keys, n), key_dtype),
        tf.constant(np.concatenate([[0], np.cumsum(lengths)]), tf.int64),
        tf.constant(rng.uniform(-1, 2, n), tf.float32) if weighted else None,
    )


def row_gradients(variable, gradient):
    """The gradient summed per key."""
    keys, _ = variable.export()
    sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, len(keys))
    return {int(k): s for k, s in zip(keys.numpy(), sums.numpy(), strict=True)}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_pooled_vectors_and_gradients_are_the_references(combiner, dtype, weighted, rng):
    v, csr = table(key_dtype=dtype), random_csr(rng, 40, dtype, weighted)
    rows = v.sparse_read(csr.keys).numpy()
    index, splits = np.arange(len(rows)), csr.row_splits.numpy()
    weights = csr.weights.numpy() if weighted else None
    upstream = rng.normal(size=[40, DIM]).astype(np.float32)
    sources = [v, *([csr.weights] if weighted else [])]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        pooled = lookup_pooled(v, csr, combiner)
        loss = tf.reduce_sum(pooled * upstream)
    assert_close(pooled.numpy(), reference.combine(rows, index, splits, weights, combiner))
    gradients = tape.gradient(loss, sources)

    per_key = reference.combine_grad_rows(upstream, index, splits, weights, len(index), combiner)
    expected = {int(k): per_key[csr.keys.numpy() == k].sum(axis=0) for k in np.unique(csr.keys)}
    found = row_gradients(v, gradients[0])
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        assert_close(found[key], gradient, scale=10)
    if weighted:
        of_weights = reference.combine_grad_weights(upstream, rows, index, splits, weights, combiner)
        # Divisors may come close to zero: the sums of weights of both signs.
        assert_close(gradients[1].numpy(), of_weights, scale=np.abs(of_weights).max())


@pytest.mark.parametrize("training", [True, False, tf.constant(True), tf.constant(False)])
def test_training_decides_whether_new_keys_get_rows(training):
    v = table()
    keys = tf.constant([[3, 4], [4, 5]], tf.int64)
    rows = lookup_rows(v, keys, training)
    assert_same(rows.numpy(), v.sparse_read(keys).numpy())
    assert int(v.size()) == (3 if training else 0)
    lookup_pooled(v, Csr(keys[0] + 10, tf.constant([0, 2], tf.int64)), "sum", training)
    assert int(v.size()) == (5 if training else 0)


def test_no_keys_at_all():
    v = table()
    empty = Csr(tf.zeros([0], tf.int64), tf.zeros([5], tf.int64))
    for combiner in COMBINERS:
        assert lookup_pooled(v, empty, combiner).numpy().tolist() == [[0.0] * DIM] * 4
    assert lookup_rows(v, tf.zeros([2, 0], tf.int64)).shape == [2, 0, DIM]


@pytest.mark.parametrize("limits, text", [
    (dict(max_nnz=2), "sample 1, feature 0 has more than max_nnz = 2"),
    (dict(max_feature_num=3), "sample 1 has more than max_feature_num = 3"),
])  # fmt: skip
def test_limits(limits, text):
    v = table(name="limits")
    csr = Csr(tf.range(6, dtype=tf.int64), tf.constant([0, 1, 2, 5, 6], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{v.table_name}.*{text}"):
        lookup_pooled(v, csr, "sum", slot_num=2, **limits)
    assert int(v.size()) == 0
    assert lookup_pooled(v, csr, "sum", slot_num=2, max_nnz=3, max_feature_num=4).shape == [4, DIM]


def test_a_full_table_stores_nothing_of_the_step():
    v = table(name="little", capacity=2)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=f"{v.table_name}.*rank 0 of 1"):
        lookup_rows(v, tf.constant([1, 2, 3], tf.int64))
    assert int(v.size()) == 0


# Several workers.


def shards(variables):
    """All rows of all shards by key."""
    rows = {}
    for rank, v in enumerate(variables):
        for key, row in zip(*[x.numpy() for x in v.export()], strict=True):
            assert int(key) % len(variables) == rank
            rows[int(key)] = row
    return rows


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("combiner, weighted", [("sum", False), ("mean", False), ("sqrtn", True)])
def test_several_workers_are_one_on_the_concatenated_batch(size, combiner, weighted, rng, monkeypatch):
    dtype = DTYPES[size]
    parts = [random_csr(rng, segments, dtype, weighted) for segments in (7, 0, 12)[:size]]  # one has no samples
    upstream = [rng.normal(size=[len(p.row_splits) - 1, DIM]).astype(np.float32) for p in parts]
    name = f"world_{next(_numbers)}"

    def program(transport):
        v = table(name=name, key_dtype=dtype, seed=5)
        part = parts[transport.rank]
        with tf.GradientTape() as tape:
            if weighted:
                tape.watch(part.weights)
            pooled = lookup_pooled(v, part, combiner)
            loss = tf.reduce_sum(pooled * upstream[transport.rank])
        gradient, of_weights = tape.gradient(loss, [v, part.weights if weighted else tf.constant(0.0)])
        return v, pooled.numpy(), row_gradients(v, gradient), of_weights, transport.collectives

    results = checked(run_world(size, program, monkeypatch))
    monkeypatch.undo()

    whole = Csr(
        tf.concat([p.keys for p in parts], 0),
        tf.concat([[0]] + [p.row_splits[1:] + sum(len(q.keys) for q in parts[:i]) for i, p in enumerate(parts)], 0),
        tf.concat([p.weights for p in parts], 0) if weighted else None,
    )
    alone = table(key_dtype=dtype, seed=5)
    with tf.GradientTape() as tape:
        if weighted:
            tape.watch(whole.weights)
        pooled = lookup_pooled(alone, whole, combiner)
        loss = tf.reduce_sum(pooled * np.concatenate(upstream))
    gradient, of_weights = tape.gradient(loss, [alone, whole.weights if weighted else tf.constant(0.0)])

    assert_close(np.concatenate([r[1] for r in results]), pooled.numpy())
    expected = row_gradients(alone, gradient)
    found = {key: g for r in results for key, g in r[2].items()}
    assert set(found) == set(expected)
    for key, g in expected.items():
        assert_close(found[key], g, scale=10)
    if weighted:
        assert_close(np.concatenate([r[3] for r in results]), of_weights.numpy(), scale=10)
    keys, rows = (x.numpy() for x in alone.export())
    united = shards([r[0] for r in results])
    assert_same_table(keys, rows, united)
    for r in results:
        assert [c.rsplit("/", 1)[1] for c in r[4]] == ["keys", "rows", "grads"]


def test_rows_of_several_workers(rng, monkeypatch):
    keys = [rng.integers(-20, 20, shape) for shape in ((2, 3), (0, 3), (4, 3))]

    def program(transport):
        v = table(name="rows", seed=1)
        mine = keys[transport.rank]
        before = lookup_rows(v, mine, training=False)
        assert int(v.size()) == 0
        rows = lookup_rows(v, mine)
        assert int(v.total_size()) == len(np.unique(np.concatenate(keys)))
        return before.numpy(), rows.numpy(), v

    results = checked(run_world(3, program, monkeypatch))
    monkeypatch.undo()
    alone = table(seed=1)
    for mine, (before, rows, v) in zip(keys, results, strict=True):
        assert_same(rows, alone.sparse_read(mine).numpy())
        assert_same(before, rows)
        assert v.world_size == 3


def test_assigned_rows_are_read_by_every_worker(monkeypatch):
    keys, values = np.arange(10), np.random.default_rng(0).normal(size=[10, DIM]).astype(np.float32)

    def program(transport):
        v = table(name="assigned")
        v.assign(keys, values)
        return v.sparse_read(keys[transport.rank :]).numpy()

    for rank, rows in enumerate(checked(run_world(2, program, monkeypatch))):
        assert_same(rows, values[rank:])


def pool(v, keys, splits):
    return lookup_pooled(v, Csr(tf.constant(keys, tf.int64), tf.constant(splits, tf.int64)), "sum", max_nnz=2)


@pytest.mark.parametrize(
    "good, bad, text",
    [
        (lambda v: lookup_rows(v, [1]), lambda v: lookup_rows(v, [20]), r"key 20 is outside \[0, 20\)"),
        (lambda v: pool(v, [1], [0, 1]), lambda v: pool(v, [1, 2, 3], [0, 3]), "more than max_nnz = 2"),
        (lambda v: pool(v, [1], [0, 1]), lambda v: pool(v, [1, 2, 3], [0, 9]), "`row_splits` must start with 0"),
    ],
    ids=["key", "max_nnz", "row_splits"],
)
def test_bad_input_on_one_worker_raises_on_all(good, bad, text, monkeypatch):
    def program(transport):
        v = table(name="bad_input", hashed=False, capacity=10)
        return (bad if transport.rank == 1 else good)(v)

    for result in run_world(2, program, monkeypatch):
        assert isinstance(result, tf.errors.InvalidArgumentError)
        assert "bad_input" in str(result) and "rank 1" in str(result)
        assert re.search(text, str(result))


def test_a_full_shard_raises_on_all(monkeypatch):
    def program(transport):
        v = table(name="one_full", capacity=2)
        keys = [[0, 1], [1, 3, 5]][transport.rank]  # three keys for rank 1
        try:
            lookup_rows(v, tf.constant(keys, tf.int64))
        except tf.errors.ResourceExhaustedError as error:
            return str(error), v.export()[0].numpy().tolist()

    for text, held in checked(run_world(2, program, monkeypatch)):
        assert "one_full" in text and "rank 1" in text and "max_vocabulary_size_per_gpu" in text
        assert held in ([], [0])  # the full shard stored nothing; the other one served its key
