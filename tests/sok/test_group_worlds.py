"""Any group, on any number of workers, is what NumPy says: outputs, and gradients summed over the workers."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sok
from tests.reference import combine as reference
from tests.sok.threads_world import checked, run_world

NUM_KEYS = 12


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init()


@st.composite
def features(draw, workers):
    """One lookup: which parameter, how it is pooled, and for each worker rows of ids and perhaps weights."""
    combiner = draw(st.sampled_from(reference.COMBINERS))
    form = draw(st.sampled_from(["ragged", "sparse"]))
    is_weighted = draw(st.booleans())
    row = st.lists(st.integers(0, NUM_KEYS - 1), max_size=4)
    rows = [draw(st.lists(row, min_size=1, max_size=4)) for _ in range(workers)]
    seed = draw(st.integers(0, 2**16))
    return draw(st.integers(0, 4)), combiner, form, is_weighted, rows, seed


@st.composite
def groups(draw):
    workers = draw(st.integers(1, 3))
    dims = draw(st.lists(st.sampled_from([1, 3, 4, 16, 17]), min_size=5, max_size=5))
    per_group = draw(st.none() | st.integers(1, 3))
    return workers, dims, draw(st.lists(features(workers), min_size=1, max_size=5)), per_group


def make_params(dims):
    """Three tables and two ordinary variables."""
    tables = [
        sok.EmbeddingVariable(dims[0], 40, name="any_hashed"),
        sok.EmbeddingVariable(dims[1], 40, name="any_identity", hashed=False),
        sok.EmbeddingVariable(dims[2], 40, name="any_int32", key_dtype=tf.int32),
    ]
    plain = [
        tf.Variable(np.random.default_rng(i).normal(size=(NUM_KEYS, dims[i])).astype(np.float32), name=f"any_{i}")
        for i in (3, 4)
    ]
    return [*tables, *plain]


def weights_of(rank, rows, seed):
    return np.random.default_rng((seed, rank)).uniform(0.5, 2, sum(map(len, rows))).astype(np.float32)


def upstream_of(rank, rows, dim, seed):
    return np.random.default_rng((seed, rank, 1)).normal(size=(len(rows), dim)).astype(np.float32)


def program_of(dims, group, per_group):
    def program(transport):
        params = make_params(dims)
        ids, weights = [], []
        for number, _, form, is_weighted, rows, seed in group:
            mine = rows[transport.rank]
            dtype = tf.int32 if number == 2 else tf.int64
            ragged = tf.ragged.constant(mine, dtype, ragged_rank=1)
            given = ragged.with_values(tf.constant(weights_of(transport.rank, mine, seed)))
            ids.append(ragged if form == "ragged" else ragged.to_sparse())
            weights.append(None if not is_weighted else given if form == "ragged" else given.to_sparse())
        with tf.GradientTape() as tape:
            outputs = sok.group_embedding_lookup_sparse(
                [params[number] for number, *_ in group],
                ids,
                [combiner for _, combiner, *_ in group],
                sp_weights=weights,
                params_num_per_group=per_group,
            )
            loss = tf.add_n(
                [
                    tf.reduce_sum(output * upstream_of(transport.rank, rows[transport.rank], dims[number], seed))
                    for output, (number, _, _, _, rows, seed) in zip(outputs, group, strict=True)
                ]
            )
        gradients = []
        for param, gradient in zip(params, tape.gradient(loss, params), strict=True):
            dense = np.zeros([NUM_KEYS, param.shape[1]])
            if gradient is not None:
                places = gradient.indices.numpy()
                if isinstance(param, sok.EmbeddingVariable):
                    places = (
                        param.export()[0].numpy()[places] if param.hashed else places * param.world_size + param.rank
                    )
                np.add.at(dense, places, gradient.values.numpy())
            gradients.append(dense)
        rows = [
            param.sparse_read(tf.range(NUM_KEYS, dtype=param.key_dtype)).numpy()
            if isinstance(param, sok.EmbeddingVariable)
            else param.numpy()
            for param in params
        ]
        return [o.numpy() for o in outputs], gradients, rows

    return program


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(groups())
def test_any_group_on_any_number_of_workers(drawn):
    workers, dims, group, per_group = drawn
    with pytest.MonkeyPatch.context() as monkeypatch:
        results = checked(run_world(workers, program_of(dims, group, per_group), monkeypatch))
    expected = [np.zeros([NUM_KEYS, dim]) for dim in dims]
    for rank, (outputs, _, params) in enumerate(results):
        for output, (number, combiner, _, is_weighted, rows, seed) in zip(outputs, group, strict=True):
            index = np.array([i for row in rows[rank] for i in row], int)
            splits = np.cumsum([0, *map(len, rows[rank])])
            weights = weights_of(rank, rows[rank], seed) if is_weighted else None
            np.testing.assert_allclose(
                output, reference.combine(params[number], index, splits, weights, combiner), rtol=1e-5, atol=1e-5
            )
            upstream = upstream_of(rank, rows[rank], dims[number], seed)
            expected[number] += reference.combine_grad_rows(upstream, index, splits, weights, NUM_KEYS, combiner)
    for number in range(5):
        found = sum(gradients[number] for _, gradients, _ in results)
        np.testing.assert_allclose(found, expected[number], rtol=1e-4, atol=1e-4)
