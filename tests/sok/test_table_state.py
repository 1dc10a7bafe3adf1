"""Rows with slots, slot sets, and second tables."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.table import state as table_state
from tests.messages import saying
from tests.sok.checkpoint_cases import DIM, RULES, assert_same_training, contents, new_table, train


def test_restored_rows_train_on_as_those_they_were_taken_from():
    table, other, optimizer, fresh = new_table(), new_table(), RULES["Adam"](), RULES["Adam"]()
    train(table, optimizer, range(8))
    keys, rows = table.export()
    slots = table.slots(optimizer.slot_set)[1]
    made = other.restore_rows(keys, rows, slots, slot_set=fresh.slot_set, rule="adam")
    assert int(made) == len(keys)
    fresh.iterations.assign(8)
    assert contents(other) == contents(table)
    assert_same_training(table, optimizer, other, fresh, range(8, 20))


def test_rows_alone_leave_slots_as_they_are():
    table, optimizer = new_table(), RULES["Adagrad"]()
    train(table, optimizer, range(3))
    keys, slots, _ = table.slots(optimizer.slot_set)
    assert int(table.restore_rows(keys, tf.zeros([len(keys), DIM]))) == 0
    np.testing.assert_array_equal(table.slots(optimizer.slot_set)[1], slots)
    assert not np.any(table.export()[1])


def test_slots_of_fresh_rows_start_as_told():
    table = new_table()
    table.restore_rows([1], [[1.0] * DIM], [[2.0] * DIM], slot_set="A", rule="adagrad", slot_init=0.5)
    table.assign([2], [[0.0] * DIM])
    assert table.slots("A")[1].numpy().tolist() == [[2.0] * DIM, [0.5] * DIM]
    assert table_state.slot_sets(table) == [table_state.SlotSet("A", "adagrad", 1, 0)]


@pytest.mark.parametrize(
    "given", [{"slots": [[1.0] * DIM]}, {"slot_set": "A", "rule": "adagrad"}, {"slots": [[1.0] * DIM], "slot_set": "A"}]
)
def test_half_of_what_slots_need_is_an_error(given):
    with pytest.raises(ValueError, match=saying("`slots`", "`slot_set` and `rule`", "given together")):
        new_table().restore_rows([1], [[1.0] * DIM], **given)


def test_rules_and_shapes_are_checked():
    table, row = new_table(), [[1.0] * DIM]
    with pytest.raises(ValueError, match=saying("`rule`", "'sgd'", "Received: 'nothing'")):
        table.restore_rows([1], row, row, slot_set="A", rule="nothing")
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`slots`", "shape [1,6]", "Received: [1,3]")):
        table.restore_rows([1], row, row, slot_set="A", rule="adam")
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`rows`", "shape [2,3]")):
        table.restore_rows([1, 2], row)
    table.restore_rows([1], row, row, slot_set="A", rule="adagrad")
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("'A' belongs to rule 'adagrad' here", "to 'adam'")):
        table.restore_rows([1], row, [[1.0] * 2 * DIM], slot_set="A", rule="adam")


def test_rows_without_room_are_all_refused():
    table = new_table(capacity=2)
    table.assign([1], [[1.0] * DIM])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="all 2 rows are in use"):
        table.restore_rows([2, 3], [[1.0] * DIM] * 2)
    assert list(contents(table)) == [1]


def test_a_second_table_takes_over():
    table = new_table()
    table.assign([1, 2], [[1.0] * DIM] * 2)
    second = table_state.second_table(table)
    table_state.swap(table, second)
    assert int(table.size()) == 0
    table_state.swap(table, second)
    assert sorted(contents(table)) == [1, 2]
    other = sok.EmbeddingVariable(DIM, 7, name="other")
    with pytest.raises(tf.errors.InvalidArgumentError, match="configured differently"):
        table_state.swap(other, second)
