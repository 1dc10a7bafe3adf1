"""DeepRec's other lookups, judged by stock TensorFlow on a matrix of the same rows: values, and a step of training."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import embedding_ops

import sok
from tests.messages import saying

v1, deeprec = tf.compat.v1, sok.deeprec
ROWS = np.random.default_rng(3).normal(size=[10, 3]).astype(np.float32)
stock_sparse, stock_safe = v1.nn.embedding_lookup_sparse, v1.nn.safe_embedding_lookup_sparse


@pytest.fixture(autouse=True)
def clean():
    yield
    deeprec.uninstall()
    sok.shutdown()


def identity_table():
    return sok.EmbeddingVariable(3, 10, name="looked_up", hashed=False, num_keys=10)


def hashed_table():
    return deeprec.get_embedding_variable("looked_up", 3, capacity=20)


def matrix():
    return v1.get_variable("looked_up", initializer=ROWS, use_resource=True)


def varied(output):
    """A loss whose gradient is another number for each of the output."""
    factors = tf.sin(tf.cast(tf.range(tf.size(output)), tf.float32))
    return tf.reduce_sum(tf.reshape(output, [-1]) * factors)


def reads(make, look_up):
    """What `look_up(variable)` gives, and the rows after a step of gradient descent by it."""
    with tf.Graph().as_default(), v1.Session() as session:
        variable = make()
        output = look_up(variable)
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize(varied(output), var_list=[variable])
        if make is matrix:
            prepare, after = v1.global_variables_initializer(), tf.convert_to_tensor(variable)
        else:
            prepare = variable.assign(tf.range(10, dtype=tf.int64), tf.constant(ROWS))
            after = variable.sparse_read(tf.range(10, dtype=tf.int64))
        session.run(v1.global_variables_initializer())
        session.run(prepare)
        value = session.run(output)
        session.run(train)
        return value, session.run(after)


def agree(make, ours, stock):
    """Whether `ours` of a table, or of a matrix, is `stock` of the matrix: values, and rows after a step."""
    found, expected = reads(make, ours), reads(matrix, stock)
    assert found[0].shape == expected[0].shape
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


def some_ids(rank=2):
    """Rows of several ids, of one, of ids below 0 alone, of none between others and at the end."""
    indices = [[0, 0], [0, 1], [0, 3], [2, 0], [2, 2], [3, 0], [3, 1]]
    ids = tf.SparseTensor(indices, tf.constant([1, 2, 1, -1, 4, -3, -1], tf.int64), [6, 4])
    return ids if rank == 2 else tf.sparse.reshape(ids, [3, 2, 4] if rank == 3 else [24])


def some_weights(rank=2):
    return some_ids(rank).with_values(tf.constant([0.5, 2.0, -1.0, 1.0, 3.0, 1.0, 1.0]))


MAKERS = pytest.mark.parametrize("make", [identity_table, hashed_table, matrix])
SAFE = {
    "contrib": deeprec.safe_embedding_lookup_sparse,
    "fused_safe": deeprec.fused_safe_embedding_lookup_sparse,
    "fused": lambda *args, **kwargs: deeprec.fused_embedding_lookup_sparse(*args, **kwargs, prune_invalid_ids=True),
}


@pytest.mark.parametrize("name", SAFE)
@MAKERS
def test_safe_lookups(make, name):
    def by(function):
        def look_up(variable):
            return tf.stack(
                [
                    function(variable, some_ids(), sparse_weights=weights, combiner=combiner, default_id=default_id)
                    for combiner in ("sum", "mean", "sqrtn", None if function in SAFE.values() else "mean")
                    for default_id in (None, 7)
                    for weights in (None, some_weights())
                ]
            )

        return look_up

    agree(make, by(SAFE[name]), by(stock_safe))


@pytest.mark.parametrize("rank", [1, 3, None])
@MAKERS
def test_ids_of_other_ranks(make, rank):
    def by(function):
        def look_up(variable):
            ids = some_ids(rank or 3)
            if rank is None:
                shape = v1.placeholder_with_default(ids.dense_shape, None)
                ids = tf.SparseTensor(v1.placeholder_with_default(ids.indices, None), ids.values, shape)
            return function(variable, ids, some_weights(rank or 3))

        return look_up

    # TensorFlow asks for the rank.
    agree(make, by(deeprec.safe_embedding_lookup_sparse), lambda variable: by_rank(variable, rank or 3))


def by_rank(variable, rank):
    return stock_safe(variable, some_ids(rank), some_weights(rank))


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@MAKERS
def test_fused_lookups_leave_out_nothing_unless_told(make, combiner, max_norm):
    ids = np.array([[1, 2], [3, 3], [4, 1]])
    weights = np.array([[0.5, -2.0], [1.0, 3.0], [-1.0, -2.0]], np.float32)

    def look_up(function, variable, called):
        given = {called: tf.sparse.from_dense(weights), "combiner": combiner, "max_norm": max_norm}
        return function(variable, tf.sparse.from_dense(ids), **given)

    for ours in (deeprec.fused_embedding_lookup_sparse, lambda *a, **o: SAFE["fused_safe"](*a, **o, prune=False)):
        agree(
            make,
            lambda variable, ours=ours: look_up(ours, variable, "sparse_weights"),
            lambda variable: look_up(stock_sparse, variable, "sp_weights"),
        )


@MAKERS
def test_norms_are_clipped_and_no_row_is_made_for_nothing(make):
    def look_up(variable):
        return deeprec.safe_embedding_lookup_sparse([variable], some_ids(), max_norm=0.5)

    agree(make, look_up, lambda variable: stock_safe(variable, some_ids(), max_norm=0.5))
    for max_norm in (None, 0.5):
        with tf.Graph().as_default(), v1.Session() as session:
            table = hashed_table()
            session.run(deeprec.safe_embedding_lookup_sparse(table, some_ids(), max_norm=max_norm))
            assert sorted(session.run(table.export()[0]).tolist()) == [1, 2, 4]


def test_rows_that_are_not_to_be_filled_are_zeros():
    with tf.Graph().as_default(), v1.Session() as session:
        table = deeprec.get_embedding_variable("unfilled", 2, capacity=9, initializer=v1.ones_initializer())
        given = {"combiner": "sum", "default_id": 5, "partition_strategy": "mod_ev", "name": "mine"}
        ids = tf.SparseTensor([[1, 0], [1, 1]], tf.constant([3, -4], tf.int64), [3, 2])
        for fills, at_ends in ((False, 0), (True, 1)):
            output = deeprec.fused_embedding_lookup_sparse(table, ids, fill_empty_row=fills, **given)
            assert session.run(output)[:, 0].tolist() == [at_ends, 2, at_ends]
            assert output.name.startswith("mine")


def test_a_list_of_partitions_of_a_variable_is_tensorflows():
    parts = [ROWS[:5], ROWS[5:]]
    ids = some_ids()
    expected = stock_safe([tf.constant(p) for p in parts], ids, partition_strategy="mod")
    for name in ("contrib", "fused"):
        found = SAFE[name](tuple(map(tf.constant, parts)), ids, partition_strategy="mod")
        np.testing.assert_allclose(found, expected, rtol=1e-6)


# What tf.nn has, of tables.


@pytest.mark.parametrize("nn", [tf.nn, v1.nn, tf.compat.v2.nn])
@pytest.mark.parametrize("make", [identity_table, hashed_table])
def test_tf_nn_takes_tables(make, nn):
    ids = np.array([[1, 2], [3, 3], [4, 1]])

    def full():
        return tf.sparse.from_dense(ids)

    stock = [stock_sparse, stock_safe]
    deeprec.install()
    agree(make, lambda v: nn.embedding_lookup(v, ids), lambda v: tf.gather(v, ids))
    agree(make, lambda v: nn.embedding_lookup_sparse(v, full(), None), lambda v: stock[0](v, full(), None))
    weights = np.array([[0.5, -2.0], [1.0, 3.0], [-1.0, -2.0]], np.float32)
    agree(
        make,
        lambda v: nn.embedding_lookup_sparse(
            v, sp_ids=full(), sp_weights=tf.sparse.from_dense(weights), combiner="sum"
        ),
        lambda v: stock[0](v, full(), tf.sparse.from_dense(weights), combiner="sum"),
    )
    agree(make, lambda v: nn.safe_embedding_lookup_sparse(v, some_ids()), lambda v: stock[1](v, some_ids()))
    agree(
        make,
        lambda v: nn.safe_embedding_lookup_sparse([v], some_ids(3), some_weights(3), "sqrtn", 7),
        lambda v: stock[1](v, some_ids(3), some_weights(3), "sqrtn", 7),
    )

    def ragged():
        return tf.RaggedTensor.from_row_splits(tf.constant([1, 2, 1], tf.int64), [0, 2, 2, 3])

    agree(
        make,
        lambda v: nn.safe_embedding_lookup_sparse(v, ragged()),
        lambda v: stock[1](v, ragged().to_sparse()),
    )


def test_tf_nn_of_what_is_no_table_is_tensorflows():
    deeprec.install()
    ids = tf.sparse.from_dense([[1, 2], [3, 3]])
    for nn in (tf.nn, v1.nn):
        found = nn.embedding_lookup_sparse(tf.constant(ROWS), ids, None)
        np.testing.assert_allclose(found, stock_sparse(tf.constant(ROWS), ids, None))
        with pytest.raises(TypeError):
            nn.embedding_lookup_sparse(tf.constant(ROWS))
        with pytest.raises(ValueError, match="combiner must be one of"):
            nn.embedding_lookup_sparse(tf.constant(ROWS), ids, None, combiner="max")


# What is refused.


@pytest.mark.parametrize(
    ("wrong", "error", "parts"),
    [
        ({"embedding_weights": None}, ValueError, ["`embedding_weights`", "a table", "Received: None"]),
        ({"embedding_weights": []}, ValueError, ["`embedding_weights`", "Received: []"]),
        ({"combiner": "max"}, ValueError, ["`combiner`", "'sqrtn'", "Received: 'max'"]),
        ({"default_id": 1.5}, ValueError, ["`default_id`", "whole number", "Received: 1.5"]),
        ({"partition_strategy": "even"}, ValueError, ["`partition_strategy`", "'div' or 'mod'", "Received: 'even'"]),
        ({"sparse_ids": [[1]]}, TypeError, ["`sparse_ids`", "SparseTensor", "Received: [[1]]"]),
        ({"sparse_weights": [[1.0]]}, TypeError, ["`sparse_weights`", "SparseTensor", "Received: [[1.0]]"]),
    ],
)
def test_what_lookups_refuse(wrong, error, parts):
    given = {"embedding_weights": hashed_table(), "sparse_ids": tf.sparse.from_dense([[1]]), **wrong}
    for function in (deeprec.safe_embedding_lookup_sparse, deeprec.fused_safe_embedding_lookup_sparse):
        with pytest.raises(error, match=saying(*parts)):
            function(**given)
    called = {"embedding_weights": "params", "sparse_ids": "sp_ids"}
    given = {called.get(name, name): value for name, value in given.items()}
    parts = [parts[0].replace("embedding_weights", "params").replace("sparse_ids", "sp_ids"), *parts[1:]]
    with pytest.raises(error, match=saying(*parts)):
        deeprec.fused_embedding_lookup_sparse(**given)


def test_several_tables_are_refused():
    tables = [hashed_table(), hashed_table()]
    with pytest.raises(ValueError, match=saying("`embedding_weights`", "one table", "placement", "Received: [")):
        deeprec.safe_embedding_lookup_sparse(tables, some_ids())
    deeprec.install()
    with pytest.raises(ValueError, match=saying("`params`", "one table")):
        tf.nn.embedding_lookup_sparse(tables, some_ids(), None)
    with pytest.raises(TypeError, match=saying("`sp_ids`", "SparseTensor")):
        tf.nn.embedding_lookup_sparse(tables[0], tf.constant([[1]]), None)


def test_dynamic_dimensions_are_refused():
    for function in (deeprec.fused_embedding_lookup_sparse, deeprec.fused_safe_embedding_lookup_sparse):
        with pytest.raises(ValueError, match=saying("`blocknums` must be None", "dynamic-dimension", "Received: [1]")):
            function(hashed_table(), some_ids(), blocknums=[1])


def test_ids_outside_are_errors():
    ids = tf.sparse.from_dense([[99]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("'looked_up", "99", "10")):
        deeprec.safe_embedding_lookup_sparse(identity_table(), ids)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("'looked_up", "-3", "10")):
        deeprec.fused_embedding_lookup_sparse(identity_table(), tf.sparse.from_dense([[-3]]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        deeprec.safe_embedding_lookup_sparse(tf.constant(ROWS), ids)


# What `install()` does.

OWNERS = [owner for m in (tf, v1, tf.compat.v2) for owner in (m, m.nn, m.feature_column)] + [embedding_ops]


def test_install_and_uninstall():
    before = [{name: getattr(owner, name) for name in dir(owner)} for owner in OWNERS]
    deeprec.install()
    for module in (tf, v1, tf.compat.v2):
        assert module.contrib.layers.safe_embedding_lookup_sparse is deeprec.safe_embedding_lookup_sparse
        assert module.contrib.layers.input_from_feature_columns is deeprec.input_from_feature_columns
        assert module.contrib.layers.sequence_input_from_feature_columns is deeprec.sequence_input_from_feature_columns
        assert module.contrib.feature_column.sequence_input_layer is deeprec.sequence_input_layer
        assert module.contrib.feature_column.sequence_numeric_column is tf.feature_column.sequence_numeric_column
        assert module.nn.fused_embedding_lookup_sparse is deeprec.fused_embedding_lookup_sparse
        assert module.nn.fused_safe_embedding_lookup_sparse is deeprec.fused_safe_embedding_lookup_sparse
        assert module.feature_column.input_layer is v1.feature_column.input_layer
        assert (
            module.feature_column.sequence_categorical_column_with_embedding
            is deeprec.sequence_categorical_column_with_embedding
        )
    assert embedding_ops.fused_safe_embedding_lookup_sparse is deeprec.fused_safe_embedding_lookup_sparse
    deeprec.uninstall()
    for owner, names in zip(OWNERS, before, strict=True):
        assert dir(owner) == list(names)
        assert all(getattr(owner, name) is value for name, value in names.items())


@pytest.mark.parametrize(
    ("owner", "name"),
    [(v1, "contrib"), (tf.feature_column, "input_layer"), (embedding_ops, "fused_safe_embedding_lookup_sparse")],
)
def test_names_that_are_taken_are_refused(owner, name, monkeypatch):
    stock = tf.nn.embedding_lookup_sparse
    monkeypatch.setattr(owner, name, len, raising=False)
    with pytest.raises(RuntimeError, match=saying(f"'{name}' of its own", "puts nothing over it")):
        deeprec.install()
    assert tf.nn.embedding_lookup_sparse is stock and not hasattr(tf, "get_embedding_variable")
