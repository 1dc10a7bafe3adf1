"""Ordinary variables in `sok.group_embedding_lookup_sparse`: judged by stock TensorFlow, one by one."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.gradients import are_distinct
from tests.messages import saying
from tests.sok.threads_world import checked, run_world

ROWS = [[3, 1, 4, 1], [], [5, 9, 2], [6], []]  # the documents' own example
COMBINERS = ("sum", "mean", "sqrtn")


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init()


def make_variable(dim, rows=10, dtype=tf.float32, name="plain"):
    values = np.random.default_rng(dim).normal(size=(rows, dim))
    return tf.Variable(tf.cast(values, dtype), name=name)


def ragged(rows, dtype=tf.int64):
    return tf.ragged.constant(rows, dtype=dtype, ragged_rank=1)


def stock(dense, ids, combiner, weights=None):
    """tf.nn's answer, but zeros for every empty sample."""
    sparse = tf.cast(ids.to_sparse(), tf.int64)
    weights = None if weights is None else tf.cast(weights.to_sparse(), dense.dtype)
    pooled = tf.nn.embedding_lookup_sparse(dense, sparse, weights, combiner=combiner)
    short = sparse.dense_shape[0] - tf.shape(pooled, out_type=tf.int64)[0]  # stock drops empty samples at the end
    return tf.pad(pooled, [[0, short], [0, 0]])


def as_matrix(gradient):
    return tf.convert_to_tensor(gradient).numpy()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16, tf.float16])
def test_outputs_and_gradients_are_those_of_tensorflow(call, dtype, weighted):
    variables = [make_variable(d, dtype=dtype) for d in (1, 3, 4, 8, 16, 17, 32, 64, 128)]
    combiners = COMBINERS * 3
    ids = [ragged([row[i % 3 :] for row in ROWS]) for i in range(len(variables))]
    weights = [i.with_values(tf.range(tf.size(i), dtype=tf.float32) / 4 + 0.5) if weighted else None for i in ids]
    upstream = [tf.cast(np.random.default_rng(v.shape[1]).normal(size=(5, v.shape[1])), dtype) for v in variables]

    def step(lookup):
        with tf.GradientTape() as tape:
            outputs = lookup()
            loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(outputs, upstream, strict=True)])
        return outputs, tape.gradient(loss, variables)

    outputs, gradients = call(
        lambda: step(lambda: sok.group_embedding_lookup_sparse(variables, ids, combiners, sp_weights=weights))
    )
    expected, expected_gradients = step(
        lambda: [stock(*of_one) for of_one in zip(variables, ids, combiners, weights, strict=True)]
    )
    tolerance = {"float32": 1e-5, "float64": 1e-12}.get(dtype.name, 0.05)  # short floats: a few roundings
    for i, variable in enumerate(variables):
        assert outputs[i].dtype == dtype and outputs[i].shape == [5, variable.shape[1]]
        np.testing.assert_allclose(outputs[i], expected[i], rtol=tolerance, atol=tolerance)
        matrix, expected_matrix = as_matrix(gradients[i]), as_matrix(expected_gradients[i])
        np.testing.assert_allclose(matrix, expected_matrix, rtol=tolerance, atol=tolerance)
        if dtype == tf.float32 and not weighted:
            assert len(set(gradients[i].indices.numpy().tolist())) == len(gradients[i].indices)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_weights_have_tensorflows_gradients(combiner):
    variable, ids = make_variable(4), ragged(ROWS)
    weights = tf.constant([0.5, 2.0, 1.0, 1.5, 1.0, 3.0, 0.25, 2.0])

    def gradient(lookup):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(lookup() ** 3)
        return tape.gradient(loss, weights)

    ours = gradient(
        lambda: sok.group_embedding_lookup_sparse([variable], [ids], combiner, sp_weights=[ids.with_values(weights)])[0]
    )
    np.testing.assert_allclose(
        ours, gradient(lambda: stock(variable, ids, combiner, ids.with_values(weights))), rtol=1e-4, atol=1e-5
    )


def test_tables_and_variables_mix_and_repeat():
    table, variable, double = (
        sok.EmbeddingVariable(2, 50, name="mixed"),
        make_variable(2),
        make_variable(3, dtype=tf.float64),
    )
    ids = ragged(ROWS)
    params = [variable, table, double, variable, table]
    with tf.GradientTape() as tape:
        outputs = sok.group_embedding_lookup_sparse(params, [ids] * 5, ["sum", "sum", "mean", "mean", "mean"])
        loss = tf.add_n([tf.reduce_sum(tf.cast(o, tf.float32)) for o in outputs])
    gradients = tape.gradient(loss, [variable, table, double])
    for output, dense, combiner in zip(
        outputs,
        (variable, tf.Variable(table.sparse_read(tf.range(10, dtype=tf.int64))), double) * 2,
        ("sum", "sum", "mean", "mean", "mean"),
        strict=False,
    ):
        np.testing.assert_allclose(output, stock(dense, ids, combiner), rtol=1e-5, atol=1e-6)
    assert are_distinct(gradients[0]) and are_distinct(gradients[1])
    # Sum and mean of the same ids: each id has 1 + 1 / (ids of its sample), a duplicate twice that.
    assert as_matrix(gradients[0])[:, 0].tolist() == pytest.approx(
        [0, 2 * 1.25, 4 / 3, 1.25, 1.25, 4 / 3, 2.0, 0, 0, 4 / 3]
    )


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_sums_of_many_16_bit_rows_are_rounded_once(dtype, combiner):
    variable = tf.Variable(tf.cast([[0.3, 0.5], [1.1, 0.7]], dtype))
    ids = tf.RaggedTensor.from_row_lengths(np.repeat([0, 1], 300), [600])
    (found,) = sok.group_embedding_lookup_sparse([variable], [ids], combiner)
    stock = tf.nn.embedding_lookup_sparse(variable, ids.to_sparse(), None, combiner=combiner)
    assert found.dtype == dtype
    np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(stock, tf.float32))


def test_rows_and_sequences_of_variables():
    variable, double = make_variable(3), make_variable(2, dtype=tf.float64)
    with tf.GradientTape() as tape:
        rows = sok.group_embedding_lookup([variable, double], [[[1, 2], [2, 3]], 4])
        padded = sok.group_embedding_lookup_sparse([variable, double], [ragged(ROWS)] * 2, is_sequence=True)
        loss = tf.reduce_sum(rows[0]) + tf.reduce_sum(padded[0])
    np.testing.assert_array_equal(rows[0], tf.gather(variable, [[1, 2], [2, 3]]))
    np.testing.assert_array_equal(rows[1], double[4])
    for output, dense in zip(padded, (variable, double), strict=True):
        assert output.shape == [5, 4, dense.shape[1]]
        np.testing.assert_array_equal(output[2], tf.pad(tf.gather(dense, ROWS[2]), [[0, 1], [0, 0]]))
    assert as_matrix(tape.gradient(loss, variable))[:, 0].tolist() == [0, 3, 3, 2, 1, 1, 1, 0, 0, 1]


def test_hundreds_of_tables_and_variables():
    rng = np.random.default_rng(0)
    params = [
        sok.EmbeddingVariable(1 + i % 7, 20, name="many") if i % 2 else make_variable(1 + i % 7) for i in range(400)
    ]
    ids = [ragged([rng.integers(0, 10, rng.integers(0, 4)).tolist() for _ in range(3)]) for _ in params]
    combiners = [COMBINERS[i % 3] for i in range(400)]
    with tf.GradientTape() as tape:
        outputs = sok.group_embedding_lookup_sparse(params, ids, combiners)
        loss = tf.add_n([tf.reduce_sum(o) for o in outputs])
    assert sum(g is not None for g in tape.gradient(loss, params)) == 400
    for param, i, combiner, output in zip(params, ids, combiners, outputs, strict=True):
        if tf.size(i.values) == 0:
            assert not np.any(output)
            continue
        is_table = isinstance(param, sok.EmbeddingVariable)
        dense = param.sparse_read(tf.range(10, dtype=tf.int64)) if is_table else param
        np.testing.assert_allclose(output, stock(dense, i, combiner), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_an_id_that_is_no_row_is_named(dtype, bad):
    variables = [make_variable(2, dtype=dtype, name="fine"), make_variable(3, dtype=dtype, name="short")]
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"variable 'short': id {bad} is outside \[0, 10\)"):
        sok.group_embedding_lookup_sparse(variables, [ragged([[9]]), ragged([[1, bad]])], "sum")
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"variable 'short': id {bad} is outside \[0, 10\)"):
        sok.group_embedding_lookup(variables, [[9], [1, bad]])


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_malformed_ids_name_the_variable(dtype):
    variable = make_variable(2, dtype=dtype, name="victim")
    outside = tf.SparseTensor(tf.constant([[0, 0], [7, 0]], tf.int64), tf.constant([1, 2], tf.int64), [2, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("variable 'victim'", "key number 1 ")):
        sok.group_embedding_lookup_sparse([variable], [outside], "sum")
    weights = ragged([[1.0], [1.0]], tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("variable 'victim'", "one weight for")):
        sok.group_embedding_lookup_sparse([variable], [ragged([[1, 2]])], "sum", sp_weights=[weights])
    splits = tf.constant([0, 2, 1, 2], tf.int64)
    falling = tf.RaggedTensor.from_row_splits(tf.constant([1, 2], tf.int64), splits, validate=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("variable 'victim'", "`row_splits` must not fall")):
        sok.group_embedding_lookup_sparse([variable], [falling], "sum")


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=saying("variable 'vector'", "matrix", "shape (4,)")):
        sok.group_embedding_lookup_sparse([tf.Variable(tf.zeros([4]), name="vector")], [ragged([[1]])])
    with pytest.raises(ValueError, match=saying("variable 'open'", "matrix [rows, dim] of known shape")):
        unknown = tf.Variable(tf.zeros([4, 2]), shape=[None, 2], name="open")
        sok.group_embedding_lookup_sparse([unknown], [ragged([[1]])])
    with pytest.raises(TypeError, match=saying("`params[0]`", "sok.EmbeddingVariable or a tf.Variable")):
        sok.group_embedding_lookup_sparse([tf.zeros([4, 2])], [ragged([[1]])])


def test_variables_of_keras_train_with_keras():
    import keras

    variable = keras.Variable(np.ones([10, 2]), name="of_keras")
    optimizer = keras.optimizers.SGD(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.group_embedding_lookup_sparse([variable], [ragged(ROWS)], "sum")[0])
    optimizer.apply_gradients([(tape.gradient(loss, variable.value), variable)])
    assert variable.numpy()[:, 0].tolist() == [1, -1, 0, 0, 0, 0, 0, 1, 1, 0]


def test_later_writes_are_seen():
    variable = make_variable(4)
    step = tf.function(lambda: sok.group_embedding_lookup_sparse([variable], [ragged(ROWS)], "sum")[0])
    step()
    variable.assign(tf.ones([10, 4]))
    assert step().numpy()[:, 0].tolist() == [4, 0, 3, 1, 0]
    variable.scatter_update(tf.IndexedSlices(tf.constant([[5.0] * 4]), tf.constant([6])))
    assert step().numpy()[:, 0].tolist() == [4, 0, 3, 5, 0]


@pytest.mark.parametrize("use_resource", [True, False])
def test_in_a_v1_graph(use_resource):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        initial = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
        variables = [
            tf.compat.v1.get_variable(name, initializer=initial, use_resource=use_resource) for name in ("a", "b")
        ]
        split = tf.compat.v1.get_variable(
            "one_part", [10, 2], partitioner=tf.compat.v1.fixed_size_partitioner(1), use_resource=use_resource
        )
        ids = tf.RaggedTensor.from_row_splits(tf.constant([3, 1, 4, 1, 5, 9, 2, 6], tf.int64), [0, 4, 4, 7, 8, 8])
        params = [variables[0], variables[1], variables[0], split]
        outputs = sok.group_embedding_lookup_sparse(params, [ids] * 4, ["sum", "mean", "sqrtn", "sum"])
        expected = [stock(v, ids, c) for v, c in zip(variables * 2, ["sum", "mean", "sqrtn"], strict=False)]
        loss, other = (tf.add_n([tf.reduce_sum(o**2) for o in x[:3]]) for x in (outputs, expected))
        gradients = [tf.convert_to_tensor(g) for x in (loss, other) for g in tf.gradients(x, variables)]
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with pytest.raises(tf.errors.FailedPreconditionError, match="has no value|uninitialized"):
            session.run(outputs)
        session.run(tf.compat.v1.global_variables_initializer())
        found, wanted, grads = session.run([outputs[:3], expected, gradients])
        session.run(train)
        after = session.run(variables)
    for a, b in zip([*found, *grads[:2]], [*wanted, *grads[2:]], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for variable, gradient in zip(after, grads[2:], strict=True):
        np.testing.assert_allclose(variable, initial - 0.1 * gradient, rtol=1e-5, atol=1e-5)


def test_variables_split_into_partitions_are_refused():
    with tf.Graph().as_default():
        split = tf.compat.v1.get_variable("parts", [10, 2], partitioner=tf.compat.v1.fixed_size_partitioner(2))
        with pytest.raises(TypeError, match="not split into partitions"):
            sok.group_embedding_lookup_sparse([split], [tf.RaggedTensor.from_row_splits([1], [0, 1])])


@pytest.mark.parametrize("per_group", [None, 1])
def test_a_bad_id_of_a_variable_on_one_worker_raises_on_all(per_group, monkeypatch):
    def program(transport):
        table, variable = sok.EmbeddingVariable(2, 50, name="told"), make_variable(2, name="told_too")
        ids = ragged([[transport.rank * 10]])
        with pytest.raises(tf.errors.InvalidArgumentError, match=saying("variable 'told_too", "id 10 is outside")):
            sok.group_embedding_lookup_sparse([variable, table], [ids, ids], "sum", params_num_per_group=per_group)
        return sok.group_embedding_lookup_sparse([table, variable], [ragged([[1]])] * 2, "sum")[1].shape

    assert checked(run_world(2, program, monkeypatch)) == [[1, 2]] * 2


def test_lookups_and_updates_from_many_threads_do_not_lock_each_other_out():
    variables = [make_variable(4) for _ in range(6)]

    def look_up(order):
        for _ in range(50):
            sok.group_embedding_lookup_sparse([variables[i] for i in order], [ragged(ROWS)] * 6, "sum")

    def update():
        for _ in range(50):
            for variable in variables:
                variable.assign_add(tf.ones([10, 4]))

    threads = [threading.Thread(target=look_up, args=(order,)) for order in ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0))]
    threads += [threading.Thread(target=update) for _ in range(2)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_v1_session_reads_rows_before_the_update_that_comes_of_them(use_resource):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("w", initializer=tf.ones([4001, 16]), use_resource=use_resource)
        ids = tf.reshape(tf.range(4000, dtype=tf.int64), [-1, 4])
        (pooled,) = sok.group_embedding_lookup_sparse([variable], [ids], "sum")
        gradient = tf.gradients(tf.reduce_sum(pooled), variable)[0]  # needs the ids alone
        train = v1.train.GradientDescentOptimizer(1.0).apply_gradients([(gradient, variable)])
        before, todo = set(), [gradient.values.op]
        while todo:
            op = todo.pop()
            if op not in before:
                before.add(op)
                todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
        assert any(op.type in ("Sok>VariablePool", "Sok>TensorPool") for op in before)
        for step in range(3):
            session.run(v1.global_variables_initializer())
            assert np.all(session.run([pooled, train])[0] == 4.0), step
