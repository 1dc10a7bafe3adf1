"""Grouped columns that are copied, pickled, or made anew from what describes them."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.compat.feature_column.grouping import group_of

fc = tf.feature_column
v1 = tf.compat.v1
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("feature_columns")

FEATURES = {"a": [[1, 2], [3, 3]], "b": [[4, 0], [0, 0]], "c": [[1, 1], [2, 1]], "d": [[0, 1], [1, 1]]}


def make_columns(grouped=True):
    def make():
        a, b, c, d = (fc.categorical_column_with_identity(name, 10) for name in "abcd")
        with tf.Graph().as_default():  # stock TensorFlow makes shared columns in graphs only; they hold nothing of it
            shared = v1.feature_column.shared_embedding_columns([d], 5, initializer=v1.ones_initializer())
        return [
            fc.embedding_column(a, 3, initializer=v1.ones_initializer()),
            fc.embedding_column(b, 2, combiner="sum", initializer=v1.constant_initializer(2.0)),
            sok.feature_column.embedding_column(c, 4, combiner="sum", initializer="ones"),
            *shared,
        ]

    if not grouped:
        return make()
    with sok.group_embedding_column_scope("copied"):
        return make()


def by_input_layer(columns):
    with tf.Graph().as_default() as graph, v1.Session() as session:
        net = v1.feature_column.input_layer({name: tf.constant(rows) for name, rows in FEATURES.items()}, columns)
        session.run(v1.global_variables_initializer())
        lookups = sum("copied" in op.name and op.type in LOOKUPS for op in graph.get_operations())
        return session.run(net), lookups


LOOKUPS = ("Sok>VariablePool", "Sok>TensorPool", "Sok>GroupLookup")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_columns_are_looked_up_as_a_group(way):
    columns = make_columns()
    copies = way(columns)
    assert [type(c).__name__ for c in copies] == [type(c).__name__ for c in columns]
    assert len({id(group_of(c)) for c in copies}) == 1 and None not in map(group_of, copies)
    assert [c.name for c in copies] == [c.name for c in columns]
    expected, lookups = by_input_layer(columns)
    found, of_copies = by_input_layer(copies)
    np.testing.assert_array_equal(found, expected)
    assert of_copies == lookups == 2  # one of the variables, one of the tables


def test_a_copy_stays_in_the_group_and_a_pickle_is_a_group_of_its_own():
    columns = make_columns()
    assert {group_of(copy.deepcopy(c)) for c in columns} == {group_of(columns[0])}
    assert group_of(pickle.loads(pickle.dumps(columns[0]))) is not group_of(columns[0])


def test_a_pickle_is_read_by_another_process(forked, tmp_path):
    (tmp_path / "columns").write_bytes(pickle.dumps(make_columns()))
    code = (
        "import pickle\n"
        "from tests.sok.test_feature_column_copies import by_input_layer\n"
        "found, lookups = by_input_layer(pickle.load(open('columns', 'rb')))\n"
        "assert lookups == 2, lookups\n"
        "print(found.tolist())\n"
    )
    done = forked.run(code, tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == by_input_layer(make_columns())[0].tolist()


def test_columns_of_layers_are_copied():
    layer = tf_keras.layers.DenseFeatures(make_columns()[:3])
    again = tf_keras.layers.DenseFeatures(copy.deepcopy(layer._feature_columns))
    features = {name: tf.constant(rows) for name, rows in FEATURES.items()}
    np.testing.assert_array_equal(again(features), layer(features))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_description_makes_the_column_anew(place):
    column, stock = make_columns()[place], make_columns(grouped=False)[place]
    config = column.get_config()
    assert config.keys() == stock.get_config().keys()
    again = type(column).from_config(config)
    assert group_of(again) is group_of(column) and again.get_config() == config
    plain = type(stock).from_config(config)
    assert type(plain) is type(stock) and group_of(plain) is None
    assert plain.get_config() == stock.get_config()
