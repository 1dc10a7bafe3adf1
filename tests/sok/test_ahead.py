"""`sok.ahead`: batch by batch what the synchronous loop gives, to the bit; its errors; its bounds."""

import logging
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sok
from sok.lookup import begun
from sok.lookup.lookup import lookup_rows
from tests.sok.ahead_cases import BETWEEN, OPTIMIZERS, Program, batch_of, compare, same


# A program takes seconds, so one that fails is not made smaller.
@settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    in_function=st.booleans(),
    depth=st.integers(1, 4),
    between=st.lists(st.sampled_from(BETWEEN), min_size=1, max_size=7),
    seed=st.integers(0, 99),
)
def test_it_is_the_synchronous_loop_to_the_bit(tmp_path_factory, optimizer, in_function, depth, between, seed):
    compare(optimizer, in_function, depth, between, tmp_path_factory.mktemp("ahead"), seed=seed)


def test_the_judge_sees_one_bit():
    same({"a": [np.float32(1), np.ones(2)]}, {"a": [np.float32(1), np.ones(2)]})
    with pytest.raises(AssertionError):
        same([np.float32([0.0])], [np.float32([-0.0])])


def test_a_step_is_traced_once_for_all_batches(tmp_path):
    program = compare("adagrad", True, 2, ["nothing"] * 6, tmp_path)
    # The batches of the iterable, whose sizes differ, are traced twice: as the first is, and with any number.
    assert program.traces == 2
    table = sok.EmbeddingVariable(2, 100, name="ahead_traces")
    data = tf.data.Dataset.range(40).map(lambda i: tf.range(i % 7)).ragged_batch(4)
    traces = []

    @tf.function
    def step(ticket):
        traces.append(1)
        with ticket:
            return sok.group_embedding_lookup_sparse([table], [tf.RaggedTensor.from_row_splits([0], [0, 1])])[0]

    pipeline = sok.ahead(data, lambda ids: sok.group_embedding_lookup_sparse([table], [ids])[0], depth=3)
    sizes = [step(ticket).shape[0] for _ in range(2) for _, ticket in pipeline]
    assert sizes == [4] * 20 and len(traces) == 1


def test_what_was_begun_changes_no_table_and_is_bounded():
    table, taken = sok.EmbeddingVariable(2, 100, name="ahead_bounded"), []

    def batches():
        for i in range(20):
            taken.append(i)
            yield tf.constant([i], tf.int64)

    pipeline = sok.ahead(batches(), lambda ids: lookup_rows(table, ids), depth=3)
    for i, (ids, ticket) in enumerate(pipeline):
        assert int(table.size()) == i
        time.sleep(0.02)
        assert len(taken) <= i + 4
        with ticket:
            lookup_rows(table, ids)
        if i == 9:
            break  # what has begun is dropped
    time.sleep(0.1)
    assert int(table.size()) == 10 and len(taken) <= 13


def test_ids_are_calculated_before_their_turn_and_in_another_thread():
    table, seen = sok.EmbeddingVariable(2, 100, name="ahead_early"), {}

    def batches():
        for i in range(4):
            seen[i] = threading.current_thread().name
            yield tf.constant([i], tf.int64)

    pipeline = iter(sok.ahead(batches(), lambda ids: lookup_rows(table, ids), depth=2))
    next(pipeline)
    for _ in range(500):
        if len(seen) == 3:
            break
        time.sleep(0.01)
    assert sorted(seen) == [0, 1, 2]
    assert seen[0] == "MainThread" and seen[2].startswith("sok-ahead")  # the first says what batches are like


@pytest.mark.parametrize("in_function", [False, True])
def test_ids_that_are_wrong_raise_in_their_own_step(in_function):
    table = sok.EmbeddingVariable(2, 10, name=f"ahead_wrong_{in_function}", hashed=False)
    data = tf.data.Dataset.from_tensor_slices(np.int64([[1], [2], [77], [3]]))

    def step(ids, ticket):
        with ticket:
            return lookup_rows(table, ids)

    step = tf.function(step) if in_function else step
    said = []
    for ids, ticket in sok.ahead(data, lambda ids: lookup_rows(table, ids), depth=3):
        try:
            step(ids, ticket)
            said.append("fine")
        except tf.errors.InvalidArgumentError as error:
            assert "77" in str(error) and table.table_name in str(error)
            said.append("wrong")
    assert said == ["fine", "fine", "wrong", "fine"] and int(table.size()) == 3


def test_a_full_table_raises_in_the_step_that_fills_it():
    table = sok.EmbeddingVariable(2, 2, name="ahead_full", hashed=True)
    data = tf.data.Dataset.from_tensor_slices(np.int64([[1], [2], [3], [2]]))
    said = []
    for ids, ticket in sok.ahead(data, lambda ids: lookup_rows(table, ids), depth=2):
        try:
            with ticket:
                lookup_rows(table, ids)
            said.append("fine")
        except tf.errors.ResourceExhaustedError:
            said.append("full")
    assert said == ["fine", "fine", "full", "fine"]


def test_what_the_data_raise_is_raised_at_the_turn_of_the_batch():
    table = sok.EmbeddingVariable(2, 10, name="ahead_data")

    def batches():
        yield tf.constant([1], tf.int64)
        yield tf.constant([2], tf.int64)
        raise KeyError("no third")

    seen = []
    with pytest.raises(KeyError, match="no third"):
        for ids, _ in sok.ahead(batches(), lambda ids: lookup_rows(table, ids), depth=4):
            seen.append(ids.numpy().tolist())
    assert seen == [[1], [2]]


def test_the_weights_of_the_step_have_their_gradient():
    table = sok.EmbeddingVariable(2, 10, name="ahead_weights", initializer="ones")
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 3], tf.int64), [2, 1])
    batch = (ids, ids.with_values(tf.constant([1.0, 2.0, 4.0])))

    def look_up(batch):
        return sok.group_embedding_lookup_sparse([table], [batch[0]], "sum", sp_weights=[batch[1]])[0]

    for (ids, weights), ticket in sok.ahead([batch], look_up):
        with tf.GradientTape() as tape, ticket:
            tape.watch(weights.values)
            pooled = look_up((ids, weights))
        np.testing.assert_array_equal(pooled, [[3, 3], [4, 4]])
        np.testing.assert_array_equal(tape.gradient(pooled, weights.values), [2, 2, 2])


def test_a_model_whose_lookups_are_one_is_taken_whole(caplog):
    inputs = [tf.keras.Input([1], dtype="int64", name=f"in{i}") for i in range(3)]
    vectors = [tf.keras.layers.Embedding(500, 4, name=f"ahead_col{i}")(x) for i, x in enumerate(inputs)]
    flat = tf.keras.layers.Flatten()(tf.keras.layers.Concatenate()(vectors))
    model = sok.distributed_model(tf.keras.Model(inputs, tf.keras.layers.Dense(1)(flat)))
    data = tf.data.Dataset.from_tensor_slices(np.arange(24, dtype=np.int64).reshape(2, 3, 4, 1))
    data = data.map(lambda x: tuple(tf.unstack(x, num=3)))

    def look_up(batch):
        return model(list(batch), training=True)

    def ahead(batch, ticket):
        with ticket:
            return look_up(batch)

    compiled = tf.function(ahead)
    for batch, ticket in sok.ahead(data, look_up, depth=2):
        expected = tf.function(look_up)(batch).numpy()
        np.testing.assert_array_equal(compiled(batch, ticket), expected)
        np.testing.assert_array_equal(ahead(batch, ticket), expected)  # one by one, eagerly
    graph = compiled.get_concrete_function(batch, ticket).graph
    assert [op.type for op in graph.get_operations() if "Lookup" in op.type] == ["Sok>GroupLookup"]
    assert "in vain" not in caplog.text and "not ahead" not in caplog.text


def look_up_late(table, other):
    """Of three lookups, the first can be begun."""

    def look_up(ids):
        total = tf.reduce_sum(lookup_rows(table, ids))
        for _ in tf.range(2):
            total += tf.reduce_sum(lookup_rows(other, ids))
        if total > 1e9:
            total += tf.reduce_sum(lookup_rows(other, ids + 1))
        return total

    return look_up


@pytest.mark.parametrize("in_function", [False, True])
def test_lookups_in_loops_and_branches_stay_in_the_step_and_are_named_once(in_function, caplog):
    caplog.set_level(logging.WARNING, "sok")
    table, other = (sok.EmbeddingVariable(2, 50, name=f"ahead_{n}_{in_function}", initializer="ones") for n in "ab")
    look_up = look_up_late(table, other)

    def step(ids, ticket):
        with ticket:
            return look_up(ids)

    step = tf.function(step) if in_function else step
    data = tf.data.Dataset.range(6).batch(2, drop_remainder=True)
    for _ in range(2):
        found = [step(ids, ticket).numpy() for ids, ticket in sok.ahead(data, look_up, depth=2)]
        assert found == [12, 12, 12]
    said = [record.getMessage() for record in caplog.records]
    assert [other.table_name in one and "a loop, a branch or a function" in one for one in said] == [True]


def test_what_reads_a_variable_or_a_lookup_stays_in_the_step():
    table, state = sok.EmbeddingVariable(2, 50, name="ahead_state", initializer="ones"), tf.Variable(5, dtype=tf.int64)
    other = sok.EmbeddingVariable(2, 50, name="ahead_state_free", initializer="ones")

    def look_up(ids):
        return lookup_rows(table, ids + state), lookup_rows(other, ids)

    for ids, ticket in sok.ahead(tf.data.Dataset.range(5).batch(1), look_up, depth=3):
        with ticket:
            look_up(ids)
        state.assign_add(10)
    assert sorted(table.export()[0].numpy()) == [5, 16, 27, 38, 49]
    assert sorted(other.export()[0].numpy()) == [0, 1, 2, 3, 4]


@pytest.fixture
def one():
    table = sok.EmbeddingVariable(2, 50, name=f"ahead_one_{time.monotonic_ns()}")
    return table, lambda ids: lookup_rows(table, ids)


def test_other_lookups_than_those_of_the_function_are_refused(one):
    table, look_up = one
    other = sok.EmbeddingVariable(2, 50, name=f"{table.table_name}_other")
    for ids, ticket in sok.ahead([tf.constant([1], tf.int64)], look_up):
        with pytest.raises(RuntimeError, match="not the next"), ticket:
            lookup_rows(other, ids)
        with pytest.raises(RuntimeError, match="other ids"), ticket:
            lookup_rows(table, ids + 1)
        with pytest.raises(RuntimeError, match="not the next"), ticket:
            look_up(ids)
            look_up(ids)
        with pytest.raises(RuntimeError, match="the `training` that it has in `lookup_fn`, True"), ticket:
            lookup_rows(table, ids, training=False)
    assert int(table.size()) == 1


def test_a_function_must_be_given_its_ticket(one, caplog):
    _, look_up = one
    for ids, ticket in sok.ahead([tf.constant([1], tf.int64)], look_up):

        @tf.function
        def step(ids, ticket=ticket):
            with step.ticket:
                return look_up(ids)

        step.ticket = ticket
        with pytest.raises(RuntimeError, match="must be an argument of the tf.function"):
            step(ids, 1)
        with ticket:
            tf.function(look_up)(ids)
    assert "in vain" in caplog.text


def test_arguments_are_checked(one):
    table, look_up = one
    for depth in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="`depth` must be a whole number, at least 1"):
            sok.ahead([], look_up, depth=depth)
    for stale in (0, True, 1.5):
        with pytest.raises(ValueError, match="`stale` must be a whole number, at least 1"):
            sok.ahead([], look_up, stale=stale)
    with pytest.raises(ValueError, match="`stale` must be at least `depth`, 3.* Received: 2"):
        sok.ahead([], look_up, depth=3, stale=2)
    with pytest.raises(TypeError, match="`rows` must be True or False. Received: 1"):
        sok.ahead([], look_up, rows=1)
    with pytest.raises(TypeError, match="`dataset` must be"):
        sok.ahead(5, look_up)
    with pytest.raises(TypeError, match="`lookup_fn` must be a function"):
        sok.ahead([], table)
    with pytest.raises(ValueError, match="looks up no table"):
        next(iter(sok.ahead([tf.constant([1])], lambda ids: ids)))
    with pytest.raises(TypeError, match="batches of `dataset` must be tensors or arrays"):
        next(iter(sok.ahead([object()], look_up)))
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="executes eagerly"):
        sok.ahead([], look_up)
    with pytest.raises(RuntimeError, match="executes eagerly"):
        tf.function(lambda: list(sok.ahead([], look_up)))()
    assert list(sok.ahead([], look_up)) == []


def test_plans_end_with_what_holds_them(one):
    _, look_up = one
    pipeline = sok.ahead([np.int64([1])], look_up)
    number = next(iter(pipeline))[1]._plan.number
    assert number in begun._plans
    del pipeline
    for _ in range(100):
        if number not in begun._plans:
            break
        time.sleep(0.01)
    assert number not in begun._plans


def test_a_batch_without_samples_is_a_batch():
    program, taken = Program.make("sgd", True), 0
    for batch, ticket in sok.ahead([batch_of(0, 0, 1, seed) for seed in range(4)], program.look_up):
        program.step(batch, ticket)
        taken += 1
    assert taken == 4
