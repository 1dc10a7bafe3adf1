"""Rows that are not pooled: `sok.group_embedding_lookup`, and sequences; groups that are cut into several."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.sok.threads_world import checked, run_world

ROWS = [[3, 1, 4, 1], [], [5, 9, 2], [6], []]


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init()


def make_table(dim, *, name="rows", key_dtype=tf.int64, hashed=True):
    return sok.EmbeddingVariable(dim, 50, name=name, key_dtype=key_dtype, hashed=hashed)


def values_of(table, ids):
    return table.sparse_read(tf.cast(tf.constant(ids), table.key_dtype)).numpy()


def gradient_by_key(table, gradient):
    keys = table.export()[0].numpy()[gradient.indices.numpy()].tolist()
    sums = {}
    for key, value in zip(keys, gradient.values.numpy(), strict=True):
        sums[key] = sums.get(key, 0) + value[0]
    return sums


@pytest.mark.parametrize("shape", [[], [3], [2, 3], [2, 1, 3], [0], [2, 0]])
def test_dense_ids_of_any_rank_give_rows(call, shape):
    table, other = make_table(4), make_table(2, key_dtype=tf.int32, hashed=False)
    ids = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    first, second = call(lambda a, b: sok.group_embedding_lookup([table, other], [a, b]), ids, ids.astype(np.int32))
    assert first.shape == [*shape, 4] and second.shape == [*shape, 2]
    np.testing.assert_array_equal(first, values_of(table, ids))
    np.testing.assert_array_equal(second, values_of(other, ids))


def test_gradients_of_rows_add_up_over_duplicates_and_lists():
    table = make_table(2)
    with tf.GradientTape() as tape:
        a, b = sok.group_embedding_lookup([table, table], [[[1, 2], [2, 2]], [3, 1]])
        loss = tf.reduce_sum(a) + 10.0 * tf.reduce_sum(b)
    assert gradient_by_key(table, tape.gradient(loss, table)) == {1: 11.0, 2: 3.0, 3: 10.0}


def test_no_feature_gives_no_output():
    assert sok.group_embedding_lookup([], []) == []
    assert sok.group_embedding_lookup_sparse([], []) == []


@pytest.mark.parametrize("form", ["ragged", "sparse", "dense"])
def test_a_sequence_has_the_rows_of_each_sample_and_zeros(call, form):
    table, other = make_table(3), make_table(2, hashed=False)
    ragged = tf.ragged.constant(ROWS, tf.int64, ragged_rank=1)
    ids = {"ragged": ragged, "sparse": ragged.to_sparse(), "dense": tf.constant([[3, 1], [4, 1]], tf.int64)}[form]
    outputs = call(lambda i: sok.group_embedding_lookup_sparse([table, other], [i, i], is_sequence=True), ids)
    rows = ROWS if form != "dense" else [[3, 1], [4, 1]]
    longest = max(map(len, rows))
    for t, output in zip((table, other), outputs, strict=True):
        expected = np.zeros([len(rows), longest, t.dim], np.float32)
        for s, row in enumerate(rows):
            expected[s, : len(row)] = values_of(t, np.array(row, int))
        np.testing.assert_array_equal(output, expected)


def test_gradients_of_a_sequence_leave_the_padding_out():
    table = make_table(2)
    with tf.GradientTape() as tape:
        (padded,) = sok.group_embedding_lookup_sparse(
            [table], [tf.ragged.constant(ROWS, tf.int64, ragged_rank=1)], is_sequence=True
        )
        loss = tf.reduce_sum(padded)
    assert gradient_by_key(table, tape.gradient(loss, table)) == {
        1: 2.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 9: 1.0
    }  # fmt: skip


def test_an_all_empty_sequence_has_no_length():
    (padded,) = sok.group_embedding_lookup_sparse(
        [make_table(2)], [tf.ragged.constant([[], []], tf.int64, ragged_rank=1)], is_sequence=True
    )
    assert padded.shape == [2, 0, 2]


def test_malformed_ids_of_a_sequence_are_refused():
    bad = tf.SparseTensor(tf.constant([[0, 0], [7, 0]], tf.int64), tf.constant([1, 2], tf.int64), [2, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside the dense_shape"):
        sok.group_embedding_lookup_sparse([make_table(2)], [bad], is_sequence=True)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 2**63 - 1])
def test_a_group_cut_into_several_gives_the_same(size):
    tables = [make_table(d) for d in (2, 3, 2, 4, 1)]
    ids = [tf.ragged.constant(ROWS, tf.int64, ragged_rank=1)] * 5

    def step(**options):
        with tf.GradientTape() as tape:
            outputs = sok.group_embedding_lookup_sparse([*tables, tables[0]], [*ids, ids[0]], "mean", **options)
            loss = tf.add_n([tf.reduce_sum(o**2) for o in outputs])
        gradients = tape.gradient(loss, tables)
        return [*outputs, *[list(gradient_by_key(t, g).items()) for t, g in zip(tables, gradients, strict=True)]]

    for cut, whole in zip(step(params_num_per_group=size), step(), strict=True):
        np.testing.assert_allclose(
            sorted(cut) if isinstance(cut, list) else cut,
            sorted(whole) if isinstance(whole, list) else whole,
            rtol=1e-5,
        )


def test_a_group_cut_into_several_is_several_exchanges(monkeypatch):
    def program(transport):
        tables = [make_table(2, name=f"cut_{t}") for t in range(5)]
        sok.group_embedding_lookup_sparse(tables, [[[1], [2]]] * 5, "sum", params_num_per_group=2)
        cut = len(transport.collectives)
        sok.group_embedding_lookup_sparse(tables, [[[1], [2]]] * 5, "sum")
        return cut, len(transport.collectives) - cut

    assert checked(run_world(2, program, monkeypatch)) == [(6, 2)] * 2


def test_rows_and_sequences_of_several_workers_are_those_of_one(monkeypatch):
    def program(transport):
        tables = [make_table(3, name="world_a"), make_table(2, name="world_b", key_dtype=tf.int32)]
        mine = ROWS[transport.rank :: transport.size]
        ids = tf.ragged.constant(mine, tf.int64, ragged_rank=1)
        with tf.GradientTape() as tape:
            dense = sok.group_embedding_lookup(tables, [[[transport.rank, 3]], transport.rank])
            padded = sok.group_embedding_lookup_sparse(tables[:1], [ids], is_sequence=True)
            loss = tf.add_n([tf.reduce_sum(x) for x in (*dense, *padded)])
        gradients = tape.gradient(loss, tables)
        by_key = [gradient_by_key(t, g) for t, g in zip(tables, gradients, strict=True)]
        return [x.numpy() for x in (*dense, *padded)], by_key

    alone = [make_table(3, name="world_a"), make_table(2, name="world_b", key_dtype=tf.int32)]
    results = checked(run_world(3, program, monkeypatch))
    for rank, (outputs, _) in enumerate(results):
        mine = ROWS[rank::3]
        expected = np.zeros([len(mine), max(map(len, mine)), 3], np.float32)
        for s, row in enumerate(mine):
            expected[s, : len(row)] = values_of(alone[0], np.array(row, int))
        np.testing.assert_array_equal(outputs[0], values_of(alone[0], [[rank, 3]]))
        np.testing.assert_array_equal(outputs[1], values_of(alone[1], rank))
        np.testing.assert_array_equal(outputs[2], expected)
    first = {key: value for _, (of_a, _) in results for key, value in of_a.items()}
    ids = [0, 1, 2, 3, 3, 3, *[i for row in ROWS for i in row]]
    assert first == {key: float(ids.count(key)) for key in ids}
    assert {key: value for _, (_, of_b) in results for key, value in of_b.items()} == {0: 1.0, 1: 1.0, 2: 1.0}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"params": make_table}, TypeError, "`params` .*list or tuple"),
        ({"params": [None]}, TypeError, r"`params\[0\]` must be"),
        ({"ids": tf.constant([1])}, TypeError, "`ids` .*list or tuple"),
        ({"ids": []}, ValueError, "`ids` .*per table, 1.*: 0"),
        ({"ids": [[1.5]]}, ValueError, "keys must be integers"),
        ({"ids": [tf.constant([1.5])]}, ValueError, "keys must be int64"),
        ({"partition_strategy": "div"}, ValueError, "`partition_strategy` must be 'mod'.*Received: 'div'"),
    ],
)
def test_misuse(change, error, message):
    with pytest.raises(error, match=message):
        sok.group_embedding_lookup(**({"params": [make_table(2)], "ids": [[1]]} | change))


@pytest.mark.parametrize(
    "ids", [tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[1]])], ids=["ragged", "sparse"]
)
def test_ids_that_are_not_dense_are_refused_by_place(ids):
    with pytest.raises(TypeError, match=r"`ids\[1\]` .*dense.*a (Ragged|Sparse)Tensor"):
        sok.group_embedding_lookup([make_table(2), make_table(3)], [[1], ids])


def test_an_id_outside_an_identity_table_is_named():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"key 50 is outside \[0, 50\)"):
        sok.group_embedding_lookup([make_table(2, hashed=False)], [[50]])
