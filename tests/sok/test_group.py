"""`sok.group_embedding_lookup_sparse` against stock TensorFlow, table by table."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sok
from sok.lookup.gradients import are_distinct
from tests.messages import saying

COMBINERS = ("sum", "mean", "sqrtn")


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init()


def make_table(dim, *, capacity=50, hashed=True, key_dtype=tf.int64, full=False, name="group"):
    table = sok.EmbeddingVariable(dim, capacity, name=name, hashed=hashed, key_dtype=key_dtype)
    if full:
        keys = tf.range(capacity, dtype=tf.int32)
        table.assign(tf.cast(keys, key_dtype), np.random.default_rng(dim).normal(size=(capacity, dim)))
    return table


def dense_twin(table, capacity=50):
    """The table as a plain variable: key k in row k."""
    keys = tf.cast(tf.range(capacity), table.key_dtype)
    return tf.Variable(table.sparse_read(keys))


def ragged(rows, dtype=tf.int64):
    return tf.ragged.constant(rows, dtype=dtype, ragged_rank=1)


def stock(dense, ids, combiner, weights=None):
    """tf.nn's answer, but zeros for every empty sample."""
    sparse = tf.cast(ids.to_sparse(), tf.int64) if isinstance(ids, tf.RaggedTensor) else ids
    if tf.size(sparse.values) == 0:
        return tf.zeros([sparse.dense_shape[0], dense.shape[1]])
    pooled = tf.nn.embedding_lookup_sparse(dense, sparse, weights, combiner=combiner)
    short = sparse.dense_shape[0] - tf.shape(pooled, out_type=tf.int64)[0]  # stock drops empty samples at the end
    return tf.pad(pooled, [[0, short], [0, 0]])


IDS = [[3, 1, 4, 1], [], [5, 9, 2], [6], []]  # the documents' own example


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
def test_outputs_and_gradients_are_those_of_tensorflow(hashed, full, compiled):
    dims, combiners = [1, 3, 4, 8, 16, 17, 32, 64, 128], ["sum", "mean", "sqrtn"] * 3
    tables = [make_table(d, hashed=hashed, full=full) for d in dims]
    twins = [dense_twin(t) for t in tables]
    ids = [ragged([row[i % 3 :] for row in IDS]) for i in range(len(dims))]
    upstream = [tf.constant(np.random.default_rng(d).normal(size=(5, d)), tf.float32) for d in dims]

    def step():
        with tf.GradientTape() as tape:
            outputs = sok.group_embedding_lookup_sparse(tables, ids, combiners)
            loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(outputs, upstream, strict=True)])
        return outputs, tape.gradient(loss, tables)

    outputs, gradients = tf.function(step)() if compiled else step()
    with tf.GradientTape() as tape:
        expected = [stock(t, i, c) for t, i, c in zip(twins, ids, combiners, strict=True)]
        loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(expected, upstream, strict=True)])
    expected_gradients = tape.gradient(loss, twins)
    for table, output, other, gradient, dense in zip(
        tables, outputs, expected, gradients, expected_gradients, strict=True
    ):
        np.testing.assert_allclose(output, other, rtol=1e-5, atol=1e-6)
        assert len(set(gradient.indices.numpy().tolist())) == len(gradient.indices)
        table_keys = table.export()[0].numpy()
        got = np.zeros((50, table.dim), np.float32)
        rows_in_order = gradient.indices.numpy()
        keys = rows_in_order if not hashed else table_keys[rows_in_order]
        got[keys] = gradient.values
        np.testing.assert_allclose(got, tf.convert_to_tensor(dense), rtol=1e-5, atol=1e-6)


def test_a_table_given_twice_gets_one_gradient():
    table = make_table(2, name="shared")
    with tf.GradientTape() as tape:
        a, b = sok.group_embedding_lookup_sparse([table, table], [ragged([[1, 2]]), ragged([[2, 3, 3]])], "sum")
        loss = tf.reduce_sum(a) + 10.0 * tf.reduce_sum(b)
    gradient = tape.gradient(loss, table)
    keys = table.export()[0].numpy()[gradient.indices.numpy()]
    assert dict(zip(keys.tolist(), gradient.values.numpy()[:, 0].tolist(), strict=True)) == {1: 1.0, 2: 11.0, 3: 20.0}
    assert are_distinct(gradient)


def test_inside_a_function_gradients_reach_the_optimizer_as_distinct():
    table, optimizer, seen = make_table(2, name="marked"), sok.optimizers.SGD(1.0), []

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.group_embedding_lookup_sparse([table], [ragged([[1, 1, 2]])], "sum")[0])
        gradient = tape.gradient(loss, table)
        seen.append(are_distinct(gradient))
        optimizer.apply_gradients([(gradient, table)])

    before = dense_twin(table).numpy()
    step()
    assert seen == [True]
    after = table.sparse_read(tf.constant([1, 2], tf.int64)).numpy()
    np.testing.assert_allclose(after, before[1:3] - [[2, 2], [1, 1]], rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "LazyAdam", "Adam"])
def test_training_many_tables_together_is_training_each_alone(optimizer):
    rng = np.random.default_rng(3)
    together = [make_table(d, name="together") for d in (3, 16)]
    alone = [make_table(d, name="alone") for d in (3, 16)]
    for table, other in zip(together, alone, strict=True):
        rows = rng.normal(size=(50, table.dim))
        for t in (table, other):
            t.assign(tf.range(50, dtype=tf.int64), rows)
    optimizers = [getattr(sok.optimizers, optimizer)(0.1) for _ in range(3)]
    for step in range(6):
        ids = [ragged(rng.integers(0, 50, size=(4, 3)).tolist()) for _ in together]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(o**2) for o in sok.group_embedding_lookup_sparse(together, ids, "mean")])
        optimizers[0].apply_gradients(zip(tape.gradient(loss, together), together, strict=True))
        for n, (table, one) in enumerate(zip(alone, ids, strict=True)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(sok.group_embedding_lookup_sparse([table], [one], "mean")[0] ** 2)
            optimizers[1 + n].apply_gradients([(tape.gradient(loss, table), table)])
        # Reading without training in between must not disturb what rows have missed.
        if step % 2:
            sok.group_embedding_lookup_sparse(together, ids, "mean", training=False)
    for table, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(table.export()[1], other.export()[1])


def test_weights_follow_tensorflow_and_have_gradients():
    tables = [make_table(3, full=True), make_table(16, full=True), make_table(2, full=True)]
    ids = [ragged(IDS)] * 3
    weights = [ragged([[0.5, 2, 1, 1], [], [1, 3, 0], [2], []], tf.float32), None, ragged(IDS, tf.float32)]
    twins = [dense_twin(t) for t in tables]
    with tf.GradientTape() as tape:
        for w in (weights[0], weights[2]):
            tape.watch(w.values)
        outputs = sok.group_embedding_lookup_sparse(tables, ids, COMBINERS, sp_weights=weights)
        loss = tf.add_n([tf.reduce_sum(o**2) for o in outputs])
    gradients = tape.gradient(loss, [weights[0].values, weights[2].values])
    for table, i, c, w, output in zip(twins, ids, COMBINERS, weights, outputs, strict=True):
        expected = stock(table, i, c, None if w is None else w.to_sparse())
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    assert all(g is not None and np.abs(g).max() > 0 for g in gradients)


def test_every_form_of_ids_and_every_key_dtype():
    rows = [[3, 1], [4, 1], [5, 9]]
    for dtype in (tf.int64, tf.int32, tf.uint32, tf.uint64):
        tables = [make_table(4, key_dtype=dtype, full=True, hashed=h) for h in (True, False, True)]
        dense = tf.cast(tf.constant(rows), dtype)
        sparse = tf.sparse.reorder(
            tf.SparseTensor([[2, 1], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0]], [9, 3, 1, 4, 1, 5], [3, 2])
        )
        forms = [ragged(rows, dtype), dense, tf.cast(sparse, dtype)]
        outputs = sok.group_embedding_lookup_sparse(tables, forms, "Sum")
        for table, output in zip(tables, outputs, strict=True):
            twin = dense_twin(table)
            np.testing.assert_allclose(output, tf.reduce_sum(tf.gather(twin, rows), 1), rtol=1e-5)


def test_without_training_nothing_is_stored():
    tables = [make_table(4), make_table(8, hashed=False)]
    outputs = sok.group_embedding_lookup_sparse(tables, [ragged([[1, 2], [3]])] * 2, "mean", training=False)
    assert [int(t.size()) for t in tables] == [0, 0]
    trained = sok.group_embedding_lookup_sparse(tables, [ragged([[1, 2], [3]])] * 2, "mean")
    assert [int(t.size()) for t in tables] == [3, 3]
    for a, b in zip(outputs, trained, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("full", [False, True])
def test_an_id_outside_an_identity_table_changes_nothing(full):
    tables = [make_table(4, hashed=False, full=full, name="ok"), make_table(4, hashed=False, full=full, name="bad")]
    sizes = [int(t.size()) for t in tables]
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("table 'bad", "key 50 is outside [0, 50)")):
        sok.group_embedding_lookup_sparse(tables, [ragged([[1]]), ragged([[2], [50]])], "sum")
    with pytest.raises(tf.errors.InvalidArgumentError, match="key -1 is outside"):
        sok.group_embedding_lookup_sparse(tables, [ragged([[1]]), ragged([[-1]])], "sum")
    assert [int(t.size()) for t in tables] == sizes


def test_a_full_identity_table_forgets_what_is_erased():
    table = make_table(4, hashed=False, full=True)
    with tf.GradientTape() as tape:
        before = sok.group_embedding_lookup_sparse([table], [ragged([[7]])], "sum")[0]
    gradient = tape.gradient(before, table)
    table.erase([7])
    sok.optimizers.SGD(1.0).apply_gradients([(gradient, table)])  # of a row that is gone
    after = sok.group_embedding_lookup_sparse([table], [ragged([[7]])], "sum")[0]
    assert np.abs(after - before).max() > 0
    np.testing.assert_array_equal(after, table.sparse_read(tf.constant([7], tf.int64)))
    assert int(table.size()) == 50


def test_a_full_shard_names_its_table():
    small = make_table(2, capacity=3, name="small")
    with pytest.raises(tf.errors.ResourceExhaustedError, match=saying("table 'small", "all 3 rows")):
        sok.group_embedding_lookup_sparse([make_table(2), small], [ragged([[1]]), ragged([[1, 2, 3, 4]])], "sum")
    assert int(small.size()) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"combiners": "max"}, ValueError, r"`combiners\[0\]` .*'sum', 'mean' or 'sqrtn'"),
        ({"combiners": ["sum"]}, ValueError, "one per table, 2"),
        ({"sp_ids": []}, ValueError, "`sp_ids` .*per table, 2.*: 0"),
        ({"sp_weights": [None]}, ValueError, "`sp_weights` .*per table"),
        ({"params": [tf.constant(1.0), tf.constant(2.0)]}, TypeError, r"`params\[0\]` must be a sok.EmbeddingVariable"),
        ({"sp_ids": [tf.constant(1.5), tf.constant(1.5)]}, (TypeError, ValueError), "integer|int64"),
        ({"sp_ids": ragged([[1]])}, TypeError, "`sp_ids` .*list or tuple"),
        ({"params": tf.constant([1.0])}, TypeError, "`params` .*list or tuple"),
        ({"partition_strategy": "div"}, ValueError, "`partition_strategy` must be 'mod'.*Received: 'div'"),
        ({"params_num_per_group": 0}, ValueError, "`params_num_per_group` .*whole number.*: 0"),
        ({"params_num_per_group": 1.5}, ValueError, "`params_num_per_group` must be"),
        (
            {"is_sequence": True, "sp_weights": [ragged([[1.0]], tf.float32), None]},
            ValueError,
            "`sp_weights` must be None with is_",
        ),
    ],
)
def test_misuse(change, error, message):
    arguments = {"params": [make_table(2), make_table(2)], "sp_ids": [ragged([[1]])] * 2, "combiners": "sum"} | change
    with pytest.raises(error, match=message):
        sok.group_embedding_lookup_sparse(**arguments)


def test_in_a_v1_graph():
    with tf.Graph().as_default():
        init = sok.Init()
        tables = [make_table(4), make_table(8)]
        ids = [tf.RaggedTensor.from_row_splits(tf.constant([3, 1, 4], tf.int64), [0, 2, 3])] * 2
        outputs = sok.group_embedding_lookup_sparse(tables, ids, "sum")
        gradients = tf.gradients([tf.reduce_sum(o) for o in outputs], [t.handle for t in tables])
        with tf.compat.v1.Session() as session:
            session.run(init)
            values, grads = session.run([outputs, gradients])
    assert [v.shape for v in values] == [(2, 4), (2, 8)]
    assert all((g.values == 1).all() for g in grads)


@st.composite
def groups(draw):
    count = draw(st.integers(1, 5))
    tables = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    combiners = draw(st.lists(st.sampled_from(COMBINERS), min_size=count, max_size=count))
    rows = st.lists(st.lists(st.integers(0, 49), max_size=5), min_size=1, max_size=6)
    ids = [draw(rows) for _ in range(count)]
    return tables, combiners, ids


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(groups())
def test_any_group_is_what_tensorflow_gives_for_each(group):
    choice, combiners, ids = group
    pool = [make_table(5), make_table(16, hashed=False), make_table(8, key_dtype=tf.int32)]
    inputs = [ragged(rows, pool[t].key_dtype) for t, rows in zip(choice, ids, strict=True)]
    twins = [dense_twin(t) for t in pool]
    outputs = sok.group_embedding_lookup_sparse([pool[t] for t in choice], inputs, combiners)
    for t, one, combiner, output in zip(choice, inputs, combiners, outputs, strict=True):
        np.testing.assert_allclose(output, stock(twins[t], one, combiner), rtol=1e-5, atol=1e-6)
