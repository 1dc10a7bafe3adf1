"""`sok.Variable` as the TensorFlow variable that scripts for SOK v2 take it for: the matrix of this worker's rows."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.sok.threads_world import checked, run_world

v1 = tf.compat.v1
MATRIX = np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.fixture(params=["value", "shape"])
def variable(request):
    if request.param == "value":
        return sok.Variable(MATRIX)
    return sok.Variable(shape=(5, 2), initializer=lambda shape, dtype: tf.reshape(tf.range(10.0), shape))


def test_it_is_a_matrix(variable):
    matrix = variable.numpy()
    assert variable.shape == (5, 2) and matrix.shape == (5, 2)
    np.testing.assert_allclose(variable**2, matrix**2, rtol=1e-6)  # TensorFlow rounds a power once more
    np.testing.assert_array_equal(tf.convert_to_tensor(variable), matrix)
    np.testing.assert_array_equal(tf.matmul(variable, [[1.0], [1.0]]), matrix.sum(1, keepdims=True))


@pytest.mark.parametrize("graph", [False, True])
def test_what_is_calculated_with_it_has_a_gradient(graph):
    variable = sok.Variable(shape=(5, 2), initializer="ones")

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.nn.l2_loss(variable) + tf.reduce_sum(sok.all2all_dense_embedding(variable, [3]))
        return tape.gradient(loss, variable)

    sok.optimizers.SGD(1.0).apply_gradients([((tf.function(gradient) if graph else gradient)(), variable)])
    np.testing.assert_array_equal(variable, [[0.0] * 2] * 3 + [[-1.0] * 2] + [[0.0] * 2])


def test_the_whole_matrix_can_be_assigned(variable):
    for values in (MATRIX + 1, tf.constant(MATRIX) * 2, (MATRIX * 3).tolist()):
        variable.assign(values)
        np.testing.assert_array_equal(variable, values)
    variable.assign([1], [[7.0, 8.0]])
    assert variable.numpy()[1].tolist() == [7.0, 8.0]


@pytest.mark.parametrize("values", [np.ones([4, 2]), np.ones([5, 3]), np.ones(5), 1.0])
def test_another_matrix_is_refused(variable, values):
    before = variable.numpy()
    with pytest.raises(ValueError, match=r"takes the whole matrix, \(5, 2\).*Received: shape \(.*assign\(indices"):
        variable.assign(values)
    np.testing.assert_array_equal(variable, before)


def test_each_worker_takes_its_rows_of_the_whole_matrix(monkeypatch):
    def program(transport):
        variables = [sok.Variable(np.zeros([5, 2]), name=f"v{mode}", mode=mode) for mode in (None, "localized:1")]
        for variable in variables:
            variable.assign(MATRIX)
        return transport.rank, [variable.shape.as_list() for variable in variables], [v.numpy() for v in variables]

    for rank, shapes, (distributed, localized) in checked(run_world(2, program, monkeypatch)):
        assert shapes == [[3 - rank, 2], [5 * rank, 2]]
        np.testing.assert_array_equal(distributed, MATRIX[rank::2])
        np.testing.assert_array_equal(localized, MATRIX if rank == 1 else MATRIX[:0])


def test_rows_of_one_worker_are_not_taken_for_the_matrix(monkeypatch):
    def program(transport):
        variable = sok.Variable(MATRIX[:4], name="v")
        with pytest.raises(ValueError, match=r"the whole matrix, \(4, 2\).*Received: shape \(2, 2\)"):
            variable.assign(variable.numpy())
        return True

    assert checked(run_world(2, program, monkeypatch)) == [True, True]


def test_sessions_run_it_assign_it_and_look_it_up():
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        variable = sok.Variable(MATRIX)
        values = v1.placeholder(tf.float32, [5, 2])
        assign, double = variable.assign(values), variable * 2.0
        rows = [look_up(variable, [4, 0]) for look_up in (tf.nn.embedding_lookup, v1.nn.embedding_lookup)]
        (gradient,) = tf.gradients(rows[0], variable)
        session.run(v1.global_variables_initializer())
        graph.finalize()
        for read in (session.run(variable), session.run({"a": [variable]})["a"][0], variable.eval()):
            np.testing.assert_array_equal(read, MATRIX)
        np.testing.assert_array_equal(session.run(rows), [MATRIX[[4, 0]]] * 2)
        assert session.run(gradient).indices.tolist() == [4, 0]
        session.run(assign, {values: MATRIX + 1})
        np.testing.assert_array_equal(session.run(double), (MATRIX + 1) * 2)


def test_other_tables_are_looked_up_by_stock_ops_in_v1_graphs_and_not_run():
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        table = sok.EmbeddingVariable(2, 10, name="t", initializer="ones")
        ids = tf.constant([[2**40, 3]])
        rows = [
            look_up(table, ids)
            for look_up in (tf.nn.embedding_lookup, v1.nn.embedding_lookup, lambda t, i: tf.gather(t, i, axis=0))
        ]
        np.testing.assert_array_equal(session.run(rows), np.ones([3, 1, 2, 2]))
        for run in (lambda: session.run(table), lambda: session.run(rows, {table: 1.0})):
            with pytest.raises(TypeError, match=r"'t.*is not a dense matrix.*Read it with"):
                run()


def test_stock_pooling_of_local_rows_is_refused(variable):
    ids = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
    with pytest.raises(TypeError, match=r"sok.lookup_sparse"):
        tf.nn.embedding_lookup_sparse(variable, ids, None)


def test_keras_copies_weights_as_matrices(tmp_path):
    class Layer(tf_keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = sok.Variable(MATRIX)

        def call(self, ids):
            return sok.all2all_dense_embedding(self.table, ids)

    model = tf_keras.Sequential([Layer()])
    model(tf.constant([[1]]))
    (weights,) = model.get_weights()
    assert weights.shape == (5, 2) and model.count_params() == 10
    for copied in (weights, weights.copy(), copy.deepcopy(weights), pickle.loads(pickle.dumps(weights)), weights * 1.0):
        model.set_weights([np.zeros([5, 2], np.float32)])
        np.testing.assert_array_equal(model.layers[0].table, np.zeros([5, 2]))
        model.set_weights([copied])
        np.testing.assert_array_equal(model.layers[0].table, MATRIX)
