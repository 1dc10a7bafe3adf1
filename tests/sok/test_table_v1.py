"""`EmbeddingVariable` in graphs of tf.compat.v1."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from sok.table.table import EmbeddingVariable

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def session(graph):
    with v1.Session(graph=graph) as session:
        yield session


def test_it_is_trainable_but_not_global():
    v = EmbeddingVariable(2, 10, name="item")
    assert v1.trainable_variables() == [v]
    assert v1.global_variables() == []
    frozen = EmbeddingVariable(2, 10, name="item", trainable=False)
    assert frozen.name == "item_1:0"
    assert v1.trainable_variables() == [v]


def test_names_start_anew_in_each_graph():
    names = [EmbeddingVariable(2, 10, name="item").name]
    with tf.Graph().as_default():
        names.append(EmbeddingVariable(2, 10, name="item").name)
    assert names == ["item:0", "item:0"]


def test_initializing_twice_changes_nothing(session):
    v, w = EmbeddingVariable(2, 10), tf.Variable(1.0)
    session.run(v1.global_variables_initializer())
    session.run(v.assign([3], [[5.0, 6.0]]))
    session.run([v1.global_variables_initializer(), v1.variables_initializer([v, w]), v.initializer])
    assert session.run(v.sparse_read([3])).tolist() == [[5, 6]]
    assert session.run(v1.report_uninitialized_variables()).tolist() == []
    assert session.run([v.is_initialized(), v1.is_variable_initialized(v)]) == [True, True]


def test_it_needs_no_initializer_to_be_run(session):
    v = EmbeddingVariable(2, 10, initializer="ones")
    assert session.run(v.sparse_read([3])).tolist() == [[1, 1]]


def test_assign_export_erase_and_size_are_ops(session):
    v = EmbeddingVariable(1, 10)
    assign, erase, size, export = v.assign([3, 4], [[5.0], [6.0]]), v.erase([3]), v.size(), v.export()
    assert isinstance(assign, tf.Operation)
    assert session.run(size) == 0
    session.run(assign)
    assert session.run(size) == 2
    assert session.run(erase) == 1
    found, rows = session.run(export)
    assert (found.tolist(), rows.tolist()) == ([4], [[6.0]])
    assert repr(v).startswith("<EmbeddingVariable 'embedding_variable' dim=1, hashed int64 keys, shard")


def test_sessions_do_not_share_rows(graph):
    v = EmbeddingVariable(1, 10)
    with v1.Session(graph=graph) as a, v1.Session(graph=graph) as b:
        a.run(v.assign([1], [[2.0]]))
        assert (a.run(v.size()), b.run(v.size())) == (1, 0)


def test_gradients_by_every_way_of_asking(session):
    v, w = EmbeddingVariable(2, 10), tf.Variable(3.0, use_resource=True)
    keys = v1.placeholder(tf.int64, [None])
    loss = w * tf.reduce_sum(lookup_rows(v, keys))
    ways = [
        tf.gradients(loss, [v])[0],
        tf.gradients(loss, v.handle)[0],
        tf.gradients(loss, v1.trainable_variables())[0],
    ]
    optimizer = v1.train.GradientDescentOptimizer(1.0)
    ways += [g for g, var in optimizer.compute_gradients(loss) if var is v]
    ways += [optimizer.compute_gradients(loss, [v])[0][0]]
    session.run(v1.global_variables_initializer())
    assert len(ways) == 5
    for gradient in ways:
        assert gradient.dense_shape is None
        found = session.run(gradient, {keys: [7, 8, 7]})
        assert found.indices.tolist() == [0, 1, 0]
        assert found.values.tolist() == [[3, 3]] * 3


def test_updates_in_a_session(session):
    v = EmbeddingVariable(1, 10, initializer="zeros")
    keys = v1.placeholder(tf.int64, [None])
    loss = tf.reduce_sum(lookup_rows(v, keys))
    train = sok.optimizers.SGD(0.5).apply_gradients([(tf.gradients(loss, [v])[0], v)])
    session.run(v1.global_variables_initializer())
    for _ in range(3):
        session.run(train, {keys: [7, 8, 7]})
    assert session.run(v.sparse_read([7, 8])).tolist() == [[-3.0], [-1.5]]


@pytest.mark.parametrize("stock", ["GradientDescentOptimizer", "AdamOptimizer"])
def test_stock_optimizers_say_what_to_use(session, stock):
    v = EmbeddingVariable(1, 10)
    optimizer = getattr(v1.train, stock)(1.0)
    with pytest.raises(TypeError, match=rf"'{v.table_name}'.*`sok.OptimizerWrapper` or `sok.DistributedOptimizer`"):
        optimizer.minimize(tf.reduce_sum(lookup_rows(v, [1])))


def test_dense_use_says_what_to_use(session):
    v = EmbeddingVariable(1, 10)
    for use in (
        lambda: session.run(v),
        lambda: v.eval(session),
        lambda: tf.identity(v),
        lambda: v1.assign_add(v, [[1.0]]),
    ):
        with pytest.raises(TypeError, match="not a dense matrix"):
            use()


def test_savers_and_meta_graphs_leave_it_out(session, tmp_path):  # P10
    v = EmbeddingVariable(1, 10, name="v")
    tf.Variable(5.0, name="w", use_resource=True)
    read = tf.identity(v.sparse_read(tf.constant([3], tf.int64)), name="read")
    session.run(v1.global_variables_initializer())
    saver = v1.train.Saver()
    with pytest.warns(UserWarning, match="rows .*'v' .*not saved"):
        path = saver.save(session, str(tmp_path / "c"))
    assert [name for name, _ in tf.train.list_variables(path)] == ["w"]
    expected = session.run(read)
    with tf.Graph().as_default(), v1.Session() as other:
        saver = v1.train.import_meta_graph(path + ".meta")
        saver.restore(other, path)
        assert other.run("w/Read/ReadVariableOp:0") == 5.0
        np.testing.assert_array_equal(other.run("read:0"), expected)  # the table is made anew, with its first rows


@pytest.mark.filterwarnings("error:The rows of embedding table")
def test_monitored_sessions(tmp_path):
    v, w = EmbeddingVariable(1, 10, initializer="zeros"), tf.Variable(1.0, use_resource=True)
    v1.train.get_or_create_global_step()
    loss = tf.reduce_sum(w * lookup_rows(v, tf.constant([1], tf.int64)))
    train = sok.optimizers.SGD(1.0).apply_gradients([(tf.gradients(loss, [v])[0], v)])
    read = v.sparse_read([1])
    with v1.train.MonitoredTrainingSession() as session:  # saves nothing, and says nothing
        session.run(train)
        assert session.run(read).tolist() == [[-1]]
    with (
        pytest.warns(UserWarning, match="are not saved here"),
        v1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path)) as session,
    ):
        session.run(train)


def test_two_tables_of_one_name_are_two(graph):
    with v1.Session(graph=graph) as session:
        v = EmbeddingVariable(1, 10, name="shared")
        session.run(v.assign([1], [[1.0]]))
        w = EmbeddingVariable(2, 10, name="shared")
        session.run(w.assign([1], [[2.0, 2.0]]))
        assert session.run(v.sparse_read([1])).tolist() == [[1]]
        assert session.run(w.sparse_read([1])).tolist() == [[2, 2]]


def test_errors_come_out_of_the_session_and_the_next_step_works(session):
    v = EmbeddingVariable(1, 10, name="strict", hashed=False, initializer="ones")
    keys = v1.placeholder(tf.int64, [None])
    read = lookup_rows(v, keys)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"strict.*key -4 is outside \[0, 10\)"):
            session.run(read, {keys: [-4]})
        assert session.run(read, {keys: [4]}).tolist() == [[1]]


@pytest.mark.parametrize("indices", [[[0, 0], [1, 1], [3, 0]], [[0, 0, 0], [0, 1, 1], [1, 1, 0]]])
def test_a_layer_of_keras_3_takes_a_sparse_placeholder_of_unknown_shape(indices):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        layer = sok.DistributedEmbedding("sum", 50, 4, slot_num=2, max_nnz=3, embedding_initializer="ones")
        ids = tf.compat.v1.sparse_placeholder(tf.int64)
        pooled = layer(ids)
        shape = [4, 3] if len(indices[0]) == 2 else [2, 2, 3]
        found = session.run(pooled, {ids: tf.compat.v1.SparseTensorValue(indices, [1, 2, 3], shape)})
    np.testing.assert_array_equal(found[:, :, 0], [[1, 1], [0, 1]])
