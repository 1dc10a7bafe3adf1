"""DeepRec's filters and evictions: what they say of a table, and that the table does it."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok import deeprec
from sok.table.state import count_step
from tests.messages import saying
from tests.sok.policy_cases import contents


@pytest.fixture(autouse=True)
def job():
    sok.shutdown()
    sok.Init()
    yield
    deeprec.uninstall()
    sok.feature_column.uninstall()
    sok.shutdown()


@pytest.mark.parametrize(
    ("option", "policy"),
    [
        (deeprec.CounterFilter(), None),
        (deeprec.CounterFilter(filter_freq=3), sok.Admission(after=3)),
        (deeprec.CBFFilter(), None),
        (deeprec.CBFFilter(3, 2**20, 0.01, tf.uint8), sok.Admission(after=3)),
        (deeprec.CBFFilter(filter_freq=2), sok.Admission(after=2)),
        (deeprec.GlobalStepEvict(), None),
        (deeprec.GlobalStepEvict(0), None),
        (deeprec.GlobalStepEvict(steps_to_live=4000), sok.Eviction(older_than=4000, every=500)),
        (deeprec.GlobalStepEvict(4), sok.Eviction(older_than=4, every=1)),
        (deeprec.GlobalStepEvict(40, every=7), sok.Eviction(older_than=40, every=7)),
        (deeprec.L2WeightEvict(), None),
        (deeprec.L2WeightEvict(l2_weight_threshold=0.02), sok.Eviction(norm_below=0.2, every=1000)),
        (deeprec.L2WeightEvict(2.0, every=5), sok.Eviction(norm_below=2.0, every=5)),
    ],
    ids=str,
)
def test_options_say_policies(option, policy):
    name = "admission" if "Filter" in type(option).__name__ else "eviction"
    assert getattr(option, name) == policy
    argument = {"admission": "filter_option", "eviction": "evict_option"}[name]
    table = deeprec.get_embedding_variable(
        "said", 4, ev_option=deeprec.EmbeddingVariableOption(**{argument: option}), capacity=10
    )
    assert getattr(table.options, name) == policy


def test_both_options_and_deeprecs_positions():
    option = deeprec.EmbeddingVariableOption("", 1000, deeprec.GlobalStepEvict(80), None, deeprec.CounterFilter(3))
    table = deeprec.get_embedding_variable("both", 4, ev_option=option)
    assert (table.options.admission.after, table.options.eviction.older_than) == (3, 80)
    old = deeprec.get_embedding_variable("old", 4, steps_to_live=80)
    assert old.options.eviction == table.options.eviction and old.options.admission is None


def deeprec_evicts(last_update, step, steps_to_live):
    """`FilterToDelete` of its globalstep_shrink_policy.h: `last_update` is the global_step before that update."""
    return step - last_update > steps_to_live


def test_a_table_lives_as_long_as_deeprecs():
    """Each pass of ours removes what a save of DeepRec after the same step would."""
    option = deeprec.EmbeddingVariableOption(evict_option=deeprec.GlobalStepEvict(3, every=1))
    table = deeprec.get_embedding_variable("lives", 3, ev_option=option, capacity=100)
    optimizer, last_updates = sok.optimizers.SGD(0.1), {}
    for step, keys in enumerate([[1, 2], [2], [3], [2], [4], [4], [1], [4], [4], [4]]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant(keys, tf.int64)))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        last_updates.update(dict.fromkeys(keys, step))
        last_updates = {key: last for key, last in last_updates.items() if not deeprec_evicts(last, step + 1, 3)}
        assert contents(table).keys() == last_updates.keys()
    assert table.stats()["evicted"] > 2


def test_a_table_admits_and_evicts_by_weight():
    option = deeprec.EmbeddingVariableOption(
        filter_option=deeprec.CounterFilter(2), evict_option=deeprec.L2WeightEvict(0.5, every=1)
    )
    table = deeprec.get_embedding_variable(
        "weighs", 3, initializer=tf.zeros_initializer(), ev_option=option, capacity=10
    )
    table.assign([5, 6], [[0.8, 0.0, 0.7], [0.6, 0.7, 0.0]])  # half the squares: 0.565 and 0.425
    lookups = tf.constant([9], tf.int64)
    for made in (0, 1):
        tf.nn.embedding_lookup(table, lookups)
        assert table.stats()["made"] == 2 + made
        count_step([table])
        assert set(contents(table)) == {5}  # and the zeros of 9 left as soon as they came


def test_columns_hand_options_on_to_their_tables():
    deeprec.install()
    option = tf.EmbeddingVariableOption(filter_option=tf.CounterFilter(2), evict_option=tf.GlobalStepEvict(16))
    item = tf.feature_column.categorical_column_with_embedding("item", dtype=tf.int64, ev_option=option)
    weighted = tf.feature_column.weighted_categorical_column(item, "weight")
    for column in (item, weighted):
        assert tf.feature_column.embedding_column(column, 2).table.admission == sok.Admission(after=2)
        assert tf.feature_column.embedding_column(column, 2).table.eviction == sok.Eviction(older_than=16, every=2)
    for copied in (copy.copy(item), pickle.loads(pickle.dumps(item)), type(item).from_config(item.get_config())):
        assert copied == item and hash(copied) == hash(item)
    assert item != tf.feature_column.categorical_column_with_embedding("item", dtype=tf.int64)
    column = sok.feature_column.embedding_column(item, 2, "sum", initializer="ones")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        net = tf.compat.v1.feature_column.input_layer({"item": tf.constant([[7, 8]])}, [column])
        (table,), _ = sok.split_embedding_variable_from_others(tf.compat.v1.trainable_variables())
        (gradient,) = tf.gradients(tf.reduce_sum(net), table)
        with tf.control_dependencies([net]):
            train = sok.optimizers.SGD(1.0).apply_gradients([(gradient, table)])
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run([net, train])[0].tolist() == [[2.0, 2.0]]
        assert session.run(table.num_rows()) == 0
        session.run(train)
        assert session.run(table.num_rows()) == 2
        np.testing.assert_array_equal(session.run(table.export()[1]), np.zeros([2, 2]))


def init_option(initializer):
    return deeprec.EmbeddingVariableOption(init_option=deeprec.InitializerOption(initializer))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: deeprec.CounterFilter(-1), ValueError, ("`filter_freq`", "[0, ", "-1")),
        (lambda: deeprec.CounterFilter(2.5), ValueError, ("`filter_freq`", "whole number", "2.5")),
        (lambda: deeprec.CBFFilter(-1), ValueError, ("`filter_freq`", "-1")),
        (lambda: deeprec.CBFFilter(1, -5), ValueError, ("`max_element_size`", "-5")),
        (lambda: deeprec.CBFFilter(1, 5), ValueError, ("`max_element_size`", "together", "5 and -1.0")),
        (lambda: deeprec.CBFFilter(1, 0, 0.1), ValueError, ("`false_positive_probability`", "together", "0 and 0.1")),
        (lambda: deeprec.CBFFilter(1, 5, 1.5), ValueError, ("`false_positive_probability`", "(0, 1)", "1.5")),
        (lambda: deeprec.GlobalStepEvict(-1), ValueError, ("`steps_to_live`", "-1")),
        (lambda: deeprec.GlobalStepEvict(1, every=0), ValueError, ("`every`", "0")),
        (lambda: deeprec.L2WeightEvict(0.0), ValueError, ("`l2_weight_threshold`", "above 0, or -1", "0.0")),
        (lambda: deeprec.L2WeightEvict(float("nan")), ValueError, ("`l2_weight_threshold`", "nan")),
        (lambda: deeprec.L2WeightEvict(1.0, every=0), ValueError, ("`every`", "0")),
        (
            lambda: deeprec.EmbeddingVariableOption(filter_option=1),
            TypeError,
            ("`filter_option`", "CounterFilter or CBFFilter", "Received: 1"),
        ),
        (
            lambda: deeprec.EmbeddingVariableOption(evict_option=deeprec.CounterFilter(1)),
            TypeError,
            ("`evict_option`", "GlobalStepEvict or L2WeightEvict", "CounterFilter"),
        ),
        (lambda: deeprec.EmbeddingVariableOption(filter=1), TypeError, ("unexpected keyword", "filter")),
        (lambda: deeprec.EmbeddingVariableOption(ckpt="a"), TypeError, ("`ckpt`", "CheckpointOption", "'a'")),
        (lambda: deeprec.CheckpointOption(None, "a"), ValueError, ("`ckpt_to_load_from`", "'a'")),
        (
            lambda: deeprec.CheckpointOption("a", init_data_source="b"),
            ValueError,
            ("`ckpt_to_load_from` or `init_data_source`, not both", "'b'"),
        ),
        (
            lambda: deeprec.CheckpointOption(None, "a", init_data_source=("b", "c")),
            ValueError,
            ("`tensor_name_in_ckpt`", "not twice", "'c'"),
        ),
        (lambda: deeprec.CheckpointOption(init_data_source=("b", 3)), TypeError, ("`init_data_source`", "('b', 3)")),
        (lambda: deeprec.CheckpointOption(init_data_source=7), TypeError, ("`init_data_source`", "sok.save", "7")),
        (lambda: deeprec.InitializerOption(default_value_dim=0), ValueError, ("`default_value_dim`", "0")),
        (
            lambda: deeprec.InitializerOption(default_value_no_permission="a"),
            ValueError,
            ("`default_value_no_permission`", "'a'"),
        ),
        (
            lambda: deeprec.get_embedding_variable("a", 2, initializer="ones", ev_option=init_option("zeros")),
            ValueError,
            ("Give `initializer` or that of an `init_option`", "'ones'"),
        ),
        (
            lambda: deeprec.categorical_column_with_embedding("a", tf.int64, ev_option=init_option("zeros")),
            ValueError,
            ("`initializer`", "sok.feature_column.embedding_column"),
        ),
        (
            lambda: deeprec.categorical_column_with_embedding(
                "a", tf.int64, ev_option=deeprec.EmbeddingVariableOption(ckpt=deeprec.CheckpointOption("a"))
            ),
            ValueError,
            ("`ckpt`", "get_embedding_variable", "sok.restore"),
        ),
        (
            lambda: deeprec.EmbeddingVariableOption(storage_option=1),
            TypeError,
            ("`storage_option`", "StorageOption", "Received: 1"),
        ),
        (
            lambda: deeprec.EmbeddingVariableOption(init_option=1),
            TypeError,
            ("`init_option`", "InitializerOption", "Received: 1"),
        ),
        (lambda: deeprec.get_embedding_variable("a", 2, steps_to_live=-3), ValueError, ("`steps_to_live`", "-3")),
        (
            lambda: deeprec.get_embedding_variable(
                "a",
                2,
                steps_to_live=3,
                ev_option=deeprec.EmbeddingVariableOption(evict_option=deeprec.GlobalStepEvict(4)),
            ),
            ValueError,
            ("`steps_to_live` or an `evict_option`", "3"),
        ),
        (
            lambda: deeprec.get_embedding_variable(
                "a",
                2,
                table=sok.TableOptions(),
                ev_option=deeprec.EmbeddingVariableOption(filter_option=deeprec.CounterFilter(4)),
            ),
            ValueError,
            ("`admission` is given twice",),
        ),
    ],
)
def test_what_options_do_not_take(make, error, words):
    with pytest.raises(error, match=saying(*words)):
        make()


def test_sok_v2_filters_by_the_admission_of_its_tables():
    filters = sok.TableOptions(admission=sok.Admission(after=2))
    table, other = sok.DynamicVariable(2, "ones", table=None), sok.DynamicVariable(2, table=filters)
    ids = tf.ragged.constant([[5]], dtype=tf.int64)
    sok.lookup_sparse(other, ids, use_low_frequency_filter=True)
    assert other.stats()["candidates"] == 1
    with pytest.raises(ValueError, match=saying("`use_low_frequency_filter`", table.table_name, "admission")):
        sok.lookup_sparse([other, table], [ids, ids], use_low_frequency_filter=True)
    assert int(table.num_rows()) == 0
