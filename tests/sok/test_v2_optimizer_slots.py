"""Slots and step counts of `sok.OptimizerWrapper`: as scripts read them, and as they are saved and restored."""

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.checkpoint import read_manifest
from sok.table import state as table_state
from sok.tools import cli
from tests.sok.wrapper_cases import BATCHES, BUFFERED, DIM, MATRIX, ROWS, STEPS, STOCK, stock_rows, tables_of, train_on

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy


@pytest.mark.parametrize("name", BUFFERED)
def test_after_a_restore_slots_and_counters_are_those_of_the_save(name, tmp_path):
    # Keys that the save does not know take rows, and slots, before it is restored; they are gone then.
    table, optimizer = tables_of(MATRIX)[1], sok.OptimizerWrapper(BUFFERED[name]())
    table.erase([6])
    train_on(table, optimizer, [0, 1])
    sok.save(tmp_path, table)
    train_on(table, optimizer, [2, 3, 4], shift=1000)
    table.erase([0, 4])
    train_on(table, optimizer, [3], shift=2000)
    again = sok.OptimizerWrapper(BUFFERED[name]())
    for trained_by in (optimizer, again):
        sok.restore(tmp_path, table, trained_by)
        train_on(table, trained_by, [2, 3, 4])
        expected = np.delete(stock_rows(BUFFERED[name]())[-1], 6, axis=0)
        keys, rows = sok.export(table)
        order = np.argsort(keys)
        np.testing.assert_array_equal(keys.numpy()[order], [0, 1, 2, 3, 4, 5, 7])
        np.testing.assert_allclose(rows.numpy()[order], expected, rtol=2e-5, atol=1e-6)
        assert int(trained_by.iterations) == STEPS


SLOTTED = {
    "sok": (lambda: sok.optimizers.Adam(0.1), "m"),
    "wrapper of v1": (lambda: sok.OptimizerWrapper(v1.MomentumOptimizer(0.1, 0.9)), "momentum"),
    "wrapper of legacy": (lambda: sok.OptimizerWrapper(legacy.SGD(0.1, momentum=0.9)), "momentum"),
    "wrapper of keras": (lambda: sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "m"),
}
DISTRIBUTED = {
    "v1": (lambda: sok.DistributedOptimizer(v1.AdamOptimizer(0.1)), "m"),
    "legacy": (lambda: sok.DistributedOptimizer(legacy.Adam(0.1)), "m"),
}


@pytest.mark.parametrize("kind", [*SLOTTED, *DISTRIBUTED])
def test_slots_are_read_as_scripts_for_tf_1_do(kind):
    (make, name), table = (SLOTTED | DISTRIBUTED)[kind], tables_of(MATRIX)[1]
    optimizer = make()
    train_on(table, optimizer, [0])
    slot = optimizer.get_slot(table, name).numpy()
    touched = np.isin(table.export()[0].numpy(), BATCHES[0])
    assert slot.shape == MATRIX.shape and slot[touched].any(axis=1).all() and not slot[~touched].any()
    if kind in SLOTTED:
        (of_table,) = optimizer._slots[name].values()
        np.testing.assert_array_equal(of_table, slot)


def test_slots_of_dense_variables_are_beside_those_of_tables():
    table, weight, stock = tables_of(MATRIX)[1], tf.Variable([1.0, 2.0]), v1.MomentumOptimizer(0.1, 0.9)
    optimizer = sok.OptimizerWrapper(stock)
    train_on(table, optimizer, [0])
    optimizer.apply_gradients([(tf.ones([2]), weight)])
    assert [found.shape.as_list() for found in optimizer._slots["momentum"].values()] == [[2], [*MATRIX.shape]]
    assert optimizer.get_slot(weight, "momentum") is stock.get_slot(weight, "momentum")


@pytest.mark.parametrize(
    "name, slots", [("v1.Adam", "mv"), ("legacy.Adam", "mv"), ("keras.Adam", "mv"), ("v1.GradientDescent", "")]
)
def test_names_of_slots_are_those_that_get_slot_knows(name, slots, tmp_path):
    table, weight, optimizer = tables_of(MATRIX)[1], tf.Variable([1.0, 2.0]), sok.OptimizerWrapper(STOCK[name]())
    assert optimizer.get_slot_names() == list(slots)
    train_on(table, optimizer, [0])
    if name.startswith("keras"):
        weight = keras.Variable([1.0, 2.0])
    optimizer.apply_gradients([(tf.ones([2]), weight)])
    assert optimizer.get_slot_names() == list(slots)
    for slot in slots:
        assert optimizer.get_slot(table, slot).shape == MATRIX.shape
        if not name.startswith("keras"):  # which has no get_slot
            assert optimizer.get_slot(weight, slot).shape == [2]
    # Slots of tables are no variables, for which TensorFlow's checkpoints take what has a name.
    saved = tf.train.Checkpoint(optimizer=optimizer, table=table, weight=weight)
    saved.restore(saved.save(str(tmp_path / "saved"))).assert_consumed()


def test_slots_in_a_graph_are_those_of_dense_variables():
    with tf.Graph().as_default():
        table, weight = sok.DynamicVariable(DIM), tf.compat.v1.get_variable("w", [2], use_resource=True)
        optimizer = sok.OptimizerWrapper(v1.MomentumOptimizer(0.1, 0.9))
        loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1])) + tf.reduce_sum(weight)
        optimizer.minimize(loss, var_list=[table, weight])
        assert [[slot.shape for slot in found.values()] for found in optimizer._slots.values()] == [[weight.shape]]


def test_slots_of_stock_optimizers_are_ordinary_ones(tmp_path):
    table, optimizer = tables_of(MATRIX)[1], sok.OptimizerWrapper(v1.RMSPropOptimizer(0.1, momentum=0.5))
    assert optimizer.embedding_optimizer.slot_names == ("velocity", "momentum")
    with pytest.raises(ValueError, match="`name` .*'velocity', 'momentum'.*'m'"):
        optimizer.get_slot(table, "m")
    np.testing.assert_array_equal(optimizer.get_slot(table, "velocity"), np.ones_like(MATRIX))
    train_on(table, optimizer, [0])
    keys, rms = table.export()[0].numpy(), optimizer.get_slot(table, "velocity").numpy()
    touched = np.isin(keys, BATCHES[0])
    assert (rms[~touched] == 1).all() and (rms[touched] != 1).any()
    (found,) = table_state.slot_sets(table)
    assert (found.rule, found.num_slots) == ("lazy_rmsprop_momentum", 2)
    sok.save(tmp_path, table)
    (saved,) = read_manifest(tmp_path).tables
    assert [(s.rule, s.num_slots) for s in saved.slot_sets] == [(found.rule, 2)]
    assert "slots 'RMSprop" in inspected(tmp_path)
    # An erased key that comes again starts anew.
    table.erase([1])
    table.assign([1], [MATRIX[1]])
    again = dict(zip(table.export()[0].numpy().tolist(), optimizer.get_slot(table, "velocity").numpy(), strict=True))
    np.testing.assert_array_equal(again[1], np.ones(DIM))
    # Who does not know the optimizer has the rows, and keeps the slots for it.
    other = sok.DynamicVariable(DIM)
    with pytest.warns(UserWarning, match="another seed"):
        sok.restore(tmp_path, {table.table_name: other})
    assert table_state.slot_sets(other) == [found]


def inspected(folder):
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        assert cli.main(["inspect", str(folder)]) in (None, 0)
    return lines.getvalue()


@pytest.mark.parametrize("name", ["keras.Nadam", "v1.Momentum", "legacy.Adam", "keras.SGD"])
def test_a_checkpoint_of_the_wrapper_holds_its_step_count(name, tmp_path):
    def made():
        table, optimizer = sok.EmbeddingVariable(DIM, ROWS, seed=1), sok.OptimizerWrapper(STOCK[name]())
        table.assign(np.arange(ROWS), MATRIX)
        return table, optimizer, tf.train.Checkpoint(table=table, optimizer=optimizer)

    table, optimizer, checkpoint = made()
    train_on(table, optimizer, [0, 1, 2])
    path = checkpoint.save(str(tmp_path / "model"))
    table, optimizer, checkpoint = made()
    checkpoint.restore(path)
    train_on(table, optimizer, [3, 4])
    expected = stock_rows(STOCK[name]())[-1]
    np.testing.assert_allclose(table.sparse_read(np.arange(ROWS)), expected, rtol=2e-5, atol=1e-6)
    assert int(optimizer.iterations) == STEPS
