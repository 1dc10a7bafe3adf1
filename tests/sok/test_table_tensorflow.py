"""`EmbeddingVariable` as a TensorFlow variable in eager mode and functions: every way to lose a gradient silently."""

import gc
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.lookup.lookup import lookup_rows
from sok.table.table import EmbeddingVariable

_numbers = itertools.count()


def table(dim=2, capacity=100, **kwargs) -> EmbeddingVariable:
    return EmbeddingVariable(dim, capacity, name=f"test_tf_{next(_numbers)}", **kwargs)


def keys(*values):
    return tf.constant(values, tf.int64)


def dense(slices, rows=4):
    """The gradient summed per row id, as a matrix: what it says, however it is cut into pieces."""
    assert isinstance(slices, tf.IndexedSlices)
    return tf.math.unsorted_segment_sum(slices.values, slices.indices, rows).numpy().tolist()


class TestTape:
    def test_gradient_is_slices_of_row_ids(self):
        v = table()
        with tf.GradientTape(persistent=True) as tape:
            rows = lookup_rows(v, keys(70, -5, 70))
            loss = tf.reduce_sum(rows * [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
        for source in (v, v.handle):
            gradient = tape.gradient(loss, source)
            assert gradient.indices.numpy().tolist() == [0, 1, 0]
            assert gradient.values.numpy().tolist() == [[1, 2], [3, 4], [10, 20]]
            # P5: a shape would let something fill the whole table.
            assert gradient.dense_shape is None

    def test_beside_dense_and_unused_variables(self):
        v, unused, w = table(), table(), tf.Variable(2.0)
        with tf.GradientTape() as tape:
            loss = w * tf.reduce_sum(lookup_rows(v, keys(1)))
        of_v, of_unused, of_w = tape.gradient(loss, [v, unused, w])
        assert dense(of_v, 1) == [[2, 2]]
        assert of_unused is None
        np.testing.assert_allclose(of_w, tf.reduce_sum(v.sparse_read([1])), rtol=1e-6)

    def test_two_lookups_add(self):
        v = table()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(v, keys(1, 2))) + 3 * tf.reduce_sum(lookup_rows(v, keys(2)))
        assert dense(tape.gradient(loss, v), 2) == [[1, 1], [4, 4]]

    def test_a_key_without_a_row_has_no_row_id(self):
        v = table()
        v.assign([1], [[0.0, 0.0]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v.sparse_read(keys(9, 1)))
        assert tape.gradient(loss, v).indices.numpy().tolist() == [-1, 0]

    def test_trainable_decides_what_a_tape_watches_by_itself(self):
        for trainable in (True, False):
            v = EmbeddingVariable(2, 5, name="watched", trainable=trainable)  # P3: the metaclass swallows arguments
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup_rows(v, keys(1)))
            assert v.trainable is trainable
            assert (tape.gradient(loss, v) is not None) is trainable
        with tf.GradientTape() as tape:
            tape.watch(v)
            loss = tf.reduce_sum(lookup_rows(v, keys(1)))
        assert tape.gradient(loss, v) is not None

    def test_through_custom_gradients_downstream(self):
        v = table()

        @tf.custom_gradient
        def doubled(x):
            return x, lambda g: 2 * g

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(doubled(lookup_rows(v, keys(3))))
        assert dense(tape.gradient(loss, v), 1) == [[2, 2]]


class TestFunctions:
    def test_tape_outside_a_function(self):  # P1
        v = table()
        read = tf.function(lambda k: tf.reduce_sum(lookup_rows(v, k)))
        with tf.GradientTape() as tape:
            loss = read(keys(4, 5, 4))
        assert dense(tape.gradient(loss, v), 2) == [[2, 2], [1, 1]]

    def test_tape_inside_and_functions_nested(self):
        v = table()
        inner = tf.function(lambda k: lookup_rows(v, k))

        @tf.function
        def step(k):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(inner(k)) + tf.reduce_sum(inner(k) * 2)
            return tape.gradient(loss, v)

        assert dense(step(keys(4, 5)), 2) == [[3, 3], [3, 3]]

    def test_made_in_the_first_trace(self):
        made = []

        @tf.function
        def read(k):
            if not made:
                made.append(table())
            return lookup_rows(made[0], k)

        first = read(keys(1)).numpy()
        assert int(made[0].size()) == 1  # a real table, not one of the graph
        np.testing.assert_array_equal(made[0].sparse_read([1]), first)

    def test_as_an_argument(self):
        a, b = table(initializer="ones"), table(initializer="zeros")
        read = tf.function(lambda v, k: lookup_rows(v, k))
        assert read(a, keys(1)).numpy().tolist() == [[1, 1]]
        assert read(b, keys(1)).numpy().tolist() == [[0, 0]]

    def test_conditionals_and_loops_are_right_or_loud(self):  # P2: without handle data the gradient is silently None
        v = table()

        @tf.function
        def both_branches(k, flag):
            with tf.GradientTape() as tape:
                rows = tf.cond(flag, lambda: lookup_rows(v, k), lambda: 2 * lookup_rows(v, k))
                loss = tf.reduce_sum(rows)
            return tape.gradient(loss, v)

        @tf.function
        def through_a_loop(k):
            with tf.GradientTape() as tape:
                total = tf.constant(0.0)
                for _ in tf.range(3):
                    total += tf.reduce_sum(lookup_rows(v, k))
            return tape.gradient(total, v)

        assert dense(both_branches(keys(4), tf.constant(False)), 1) == [[2, 2]]
        with pytest.raises(Exception, match=r"tf\.while_loop does"):  # StagingError, a LookupError within
            through_a_loop(keys(4))

    def test_a_whole_step_may_be_in_a_loop(self):
        v = table(initializer="zeros")
        optimizer = sok.optimizers.SGD(1.0)

        @tf.function
        def steps(k):
            for _ in tf.range(3):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(lookup_rows(v, k))
                optimizer.apply_gradients([(tape.gradient(loss, v), v)])

        steps(keys(4))
        assert v.sparse_read([4]).numpy().tolist() == [[-3, -3]]

    def test_reads_and_updates_happen_in_the_order_written(self):
        v = table(initializer="zeros")
        optimizer = sok.optimizers.SGD(1.0)
        seen_wrong = 0

        @tf.function
        def step(k):
            with tf.GradientTape() as tape:
                before = lookup_rows(v, k)
                loss = tf.reduce_sum(before)
            optimizer.apply_gradients([(tape.gradient(loss, v), v)])
            return before, lookup_rows(v, k), v.size()

        for n in range(50):
            before, after, size = step(keys(4, 9))
            seen_wrong += not (np.all(before == -n) and np.all(after == -n - 1) and int(size) == 2)
        assert seen_wrong == 0

    def test_a_function_keeps_its_table_alive(self):  # P9
        def make():
            v = table(initializer="ones")
            return tf.function(lambda k: lookup_rows(v, k)).get_concrete_function(tf.TensorSpec([None], tf.int64))

        read = make()
        gc.collect()
        assert read(keys(1)).numpy().tolist() == [[1, 1]]

    def test_lookup_in_a_data_set(self):
        v = table(initializer="ones")
        data = tf.data.Dataset.range(3).map(lambda k: v.sparse_read(k[None]))
        assert [x.numpy().tolist() for x in data] == [[[1, 1]]] * 3

    def test_xla_is_refused_and_not_wrong(self):  # P11
        v = table()
        with pytest.raises(tf.errors.InvalidArgumentError, match="XLA_CPU_JIT|uncompilable|unsupported"):
            tf.function(lambda k: lookup_rows(v, k), jit_compile=True)(keys(1))

    def test_an_error_leaves_the_next_step_working(self):
        v = table(hashed=False, initializer="ones")
        read = tf.function(lambda k: lookup_rows(v, k))
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError, match="key 100 is outside"):
                read(keys(100))
            assert read(keys(1)).numpy().tolist() == [[1, 1]]


class TestTracking:
    def test_modules_find_it(self):
        class Module(tf.Module):
            def __init__(self):
                super().__init__()
                self.tables = [table(), {"frozen": table(trainable=False)}]

        module = Module()
        assert [v is module.tables[0] for v in module.trainable_variables] == [True]
        assert len(module.variables) == 2

    def test_saved_models_are_refused_while_saving(self, tmp_path):  # P6: else only loading would fail
        module = tf.Module()
        module.v = table()
        with pytest.raises(NotImplementedError, match="cannot go into a SavedModel"):
            tf.saved_model.save(module, str(tmp_path / "m"))


STOCK = {
    "keras": (keras.optimizers, ["SGD", "Adam", "Adafactor"]),
    "tf_keras": (tf_keras.optimizers, ["SGD", "Adadelta", "Adam", "Ftrl"]),
    "legacy": (tf_keras.optimizers.legacy, ["SGD", "Adagrad", "Adam", "Adamax", "RMSprop"]),
    "v1": (tf.compat.v1.train, ["GradientDescentOptimizer", "AdagradOptimizer", "AdamOptimizer", "RMSPropOptimizer"]),
}
KINDS = {
    "table": table,
    "layer": lambda: sok.DistributedEmbedding("sum", 10, 2, 1, 4).embedding_variable,
    "static": lambda: sok.Variable(np.ones([4, 2], np.float32)),
    "dynamic": lambda: sok.DynamicVariable(2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", STOCK)
def test_stock_optimizers_say_what_to_use(library, kind, call):  # elsewhere they fail late, or write somewhere
    module, names = STOCK[library]
    v = KINDS[kind]()
    for name in names:
        stock = getattr(module, name)(0.1)

        def step(stock=stock):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup_rows(v, keys(1, 2)))
            stock.apply_gradients([(tape.gradient(loss, v), v)])

        lookup_rows(v, keys(1, 2))
        before = v.export()[1].numpy()
        with pytest.raises(TypeError, match=rf"'{v.table_name}'.*`sok.OptimizerWrapper` or `sok.DistributedOptimizer`"):
            call(step)
        np.testing.assert_array_equal(v.export()[1], before)


@pytest.mark.parametrize("look_up", [tf.nn.embedding_lookup, tf.gather])
def test_what_tensorflow_gathers_gets_rows_that_are_trained(call, look_up):
    table, optimizer = EmbeddingVariable(2, 10, initializer="ones"), sok.optimizers.SGD(0.5)

    def step(keys):
        with tf.GradientTape() as tape:
            rows = look_up(table, keys)
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return rows

    assert call(step, keys(3, 4)).shape == (2, 2)
    assert table.sparse_read([3, 4, 5]).numpy().tolist() == [[0.5, 0.5]] * 2 + [[1.0, 1.0]]
    call(lambda: table.sparse_read([5]))
    assert int(table.size()) == 2, "sparse_read itself makes no row"
