"""`sok.feature_column.embedding_column`: columns whose rows are in tables of ours."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.messages import saying
from tests.sok.threads_world import checked, run_world

fc = tf.feature_column
v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("feature_columns")


def item(name="item", buckets=10):
    return fc.categorical_column_with_identity(name, buckets)


FEATURES = {"item": [[1, 2], [-1, -1], [3, -1]], "user": [[1, 1], [2, 3], [4, -1]]}


def features():
    return {name: tf.constant(rows) for name, rows in FEATURES.items()}


def expected(table_rows, feature, combiner):
    """By NumPy: ids below 0 are left out."""
    pooled = []
    for row in FEATURES[feature]:
        rows = table_rows[[i for i in row if i >= 0]]
        pooled.append(rows.sum(0) / {"sum": 1, "mean": max(len(rows), 1), "sqrtn": max(len(rows), 1) ** 0.5}[combiner])
    return np.array(pooled)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("capacity", [None, 100])
def test_input_layer_pools_rows_of_tables_and_trains_them(capacity, grouped):
    def make():
        return [
            sok.feature_column.embedding_column(item(), 3, combiner="sum", capacity=capacity),
            fc.numeric_column("number"),
            sok.feature_column.embedding_column(item("user"), 2, combiner="Mean", capacity=capacity),
        ]

    with tf.Graph().as_default() as graph, v1.Session() as session:
        if grouped:
            with sok.group_embedding_column_scope():
                columns = make()
        else:
            columns = make()
        numbers = tf.constant([[7.0], [8.0], [9.0]])
        net = v1.feature_column.input_layer({**features(), "number": numbers}, columns)
        tables, others = sok.split_embedding_variable_from_others(v1.trainable_variables())
        assert [t.table_name for t in tables] == [
            "input_layer/item_embedding/embedding_weights",
            "input_layer/user_embedding/embedding_weights",
        ]
        assert others == () and v1.global_variables() == []
        rows = [t.sparse_read(tf.range(10, dtype=tf.int64)) for t in tables]
        gradients = tf.gradients(tf.reduce_sum(net), tables)
        train = sok.optimizers.SGD(1.0).apply_gradients(zip(gradients, tables, strict=True))
        session.run(v1.global_variables_initializer())
        before = session.run(rows)
        output = session.run(net)
        session.run(train)
        after = session.run(rows)
        assert [session.run(t.size()) for t in tables] == [3, 4]
    np.testing.assert_allclose(output[:, :3], expected(before[0], "item", "sum"), rtol=1e-5)
    assert output[:, 3].tolist() == [7, 8, 9]
    np.testing.assert_allclose(output[:, 4:], expected(before[1], "user", "mean"), rtol=1e-5)
    moved = [np.round(b[:, 0] - a[:, 0], 4).tolist() for b, a in zip(before, after, strict=True)]
    assert moved == [[0, 1, 1, 1, *[0] * 6], [0, 1, 0.5, 0.5, 1, *[0] * 5]]
    assert [op.type for op in graph.get_operations()].count("Sok>GroupLookup") == (1 if grouped else 2)


def test_a_fresh_row_is_as_tensorflow_would_draw_it():
    layer = tf_keras.layers.DenseFeatures([sok.feature_column.embedding_column(item(buckets=20_000), 16)])
    rows = layer({"item": tf.range(20_000)[:, None]}, training=False).numpy()
    assert abs(rows.mean()) < 0.005 and abs(rows).max() <= 2 / 4  # two standard deviations of 1 / sqrt(16)
    assert rows.std() == pytest.approx(0.25 * 0.8796, rel=0.02)


@pytest.mark.parametrize(
    ("training", "rows"),
    [
        (False, 0),
        (np.False_, 0),
        (tf.constant(False), 0),
        (True, 2),
        (np.True_, 2),
        (tf.constant(True), 2),
        (0, 2),
        (None, 2),
    ],
)
def test_rows_are_made_where_a_layer_trains(training, rows):
    layer = tf_keras.layers.DenseFeatures([sok.feature_column.embedding_column(item(), 2, capacity=50)])
    layer({"item": tf.constant([[3], [4]])}, training=training)
    (table,) = layer.trainable_variables
    assert int(table.size()) == rows


def test_scopes_that_reuse_share_the_table():
    with tf.Graph().as_default():
        column = sok.feature_column.embedding_column(item(), 2)

        def net(**options):
            with v1.variable_scope("model", **options):
                v1.feature_column.input_layer(features(), [column])
            return v1.trainable_variables()

        first = net()
        assert net(reuse=True) == first and net(reuse=v1.AUTO_REUSE) == first
        with pytest.raises(ValueError, match=saying("Table 'model/input_layer/item_embedding/", "' already exists")):
            net()
        with (
            v1.variable_scope("other", reuse=True),
            pytest.raises(ValueError, match=saying("'other/", "' does not exist")),
        ):
            v1.feature_column.input_layer(features(), [column])
        with (
            v1.variable_scope("model", reuse=True),
            pytest.raises(ValueError, match=saying("has rows of dim 2", "Received: dim 3")),
        ):
            v1.feature_column.input_layer(features(), [sok.feature_column.embedding_column(item(), 3)])


@pytest.mark.parametrize("grouped", [False, True])
def test_dense_features_train_and_evaluate(grouped):
    def make():
        return [sok.feature_column.embedding_column(item(name), 4, capacity=50) for name in ("item", "user")]

    if grouped:
        with sok.group_embedding_column_scope():
            columns = make()
    else:
        columns = make()
    model = tf_keras.Sequential([tf_keras.layers.DenseFeatures(columns), tf_keras.layers.Dense(1)])
    model.compile(sok.DistributedOptimizer(tf_keras.optimizers.Adam(0.1)), "mse")
    data = tf.data.Dataset.from_tensors((features(), tf.constant([[1.0], [2.0], [3.0]])))
    model.evaluate(data, verbose=0)
    tables = [w for w in model.trainable_weights if isinstance(w, sok.EmbeddingVariable)]
    assert len(tables) == 2 and [int(t.size()) for t in tables] == [0, 0]
    history = model.fit(data.repeat(30), epochs=2, verbose=0).history["loss"]
    assert [int(t.size()) for t in tables] == [3, 4]
    assert history[-1] < 0.1 * history[0]
    assert model.evaluate(data, verbose=0) < 0.01


def test_a_layer_called_by_hand_makes_rows(call):
    layer = tf_keras.layers.DenseFeatures([sok.feature_column.embedding_column(item(), 4, capacity=50)])
    layer.build(None)
    (table,) = layer.trainable_weights
    call(lambda: layer(features(), training=False))
    assert int(table.size()) == 0
    call(lambda: layer(features()))
    assert int(table.size()) == 3


def test_two_layers_have_two_tables():
    column = sok.feature_column.embedding_column(item(), 4)
    layers = [tf_keras.layers.DenseFeatures([column]) for _ in range(2)]
    for layer in layers:
        layer(features())
    assert layers[0].trainable_weights[0] is not layers[1].trainable_weights[0]


def test_tables_and_variables_are_one_group():
    with sok.group_embedding_column_scope():
        columns = [
            sok.feature_column.embedding_column(item(), 4, initializer="ones"),
            fc.embedding_column(item("user"), 2, initializer=tf.ones_initializer()),
        ]
    net = tf_keras.layers.DenseFeatures(columns)(features())
    assert net.numpy().tolist() == [[1] * 6, [0] * 4 + [1] * 2, [1] * 6]


@pytest.mark.parametrize(
    "initializer",
    [None, "he_uniform", tf_keras.initializers.Constant(2.0), keras.initializers.HeNormal(), v1.zeros_initializer()],
)
def test_a_saved_configuration_makes_the_same_column(initializer):
    column = sok.feature_column.embedding_column(
        item(), 4, "sum", initializer=initializer, capacity=70, trainable=False
    )
    layer = tf_keras.layers.DenseFeatures([column])
    again = tf_keras.layers.DenseFeatures.from_config(json.loads(json.dumps(layer.get_config())))
    layer.build(None)
    again.build(None)
    specs = [of.non_trainable_weights[0]._initializer_spec for of in (layer, again)]
    assert (specs[0].kind, specs[0].a, specs[0].b) == (specs[1].kind, specs[1].a, specs[1].b)
    (table,) = again.non_trainable_weights
    assert (table.capacity, table.hashed, again.trainable_weights) == (70, True, [])


def test_the_scope_on_several_workers_is_one_exchange(monkeypatch):
    def program(transport):
        with sok.group_embedding_column_scope():
            columns = [sok.feature_column.embedding_column(item(name), 2) for name in ("item", "user")]
        layer = tf_keras.layers.DenseFeatures(columns, name="net")
        net = layer(features()).numpy()
        return net, [(t.capacity, int(t.size())) for t in layer.trainable_weights], len(transport.collectives)

    results = checked(run_world(3, program, monkeypatch))
    # Ten ids over three workers; row numbers are the ids of item (1, 2, 3) and user (1, 2, 3, 4).
    assert [sizes for _, sizes, _ in results] == [[(4, 1), (4, 1)], [(4, 1), (4, 2)], [(4, 1), (4, 1)]]
    for net, _, collectives in results:
        np.testing.assert_array_equal(net, results[0][0])
        assert collectives == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"categorical_column": "item"}, "`categorical_column` must be one of"),
        ({"dimension": 0}, "`dimension` .*Received: 0"),
        ({"combiner": "max"}, "`combiner` .*'sum', 'mean' or 'sqrtn'.*'max'"),
        ({"initializer": "no such"}, "`initializer` .*Keras"),
        ({"capacity": 0}, "`capacity` .*whole number"),
        ({"max_norm": 1.0}, "`max_norm` must be None"),
        ({"ckpt_to_load_from": "x"}, "`ckpt_to_load_from` must be None"),
        ({"tensor_name_in_ckpt": "x"}, "`tensor_name_in_ckpt` must be None"),
    ],
)
def test_misuse(change, message):
    with pytest.raises(ValueError, match=message):
        sok.feature_column.embedding_column(**({"categorical_column": item(), "dimension": 2} | change))


def test_an_id_outside_the_buckets_is_named():
    layer = tf_keras.layers.DenseFeatures([sok.feature_column.embedding_column(item(), 2)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"key 10 is outside \[0, 10\)"):
        layer({"item": tf.constant([[10]])})


@pytest.mark.parametrize(
    ("placement", "capacity"),
    [(sok.table_wise(1), None), (sok.row_wise(hash=True), 100)],
    ids=["table_wise", "by hash"],
)
def test_a_column_says_where_its_rows_lie(placement, capacity, monkeypatch):
    def program(_):
        column = sok.feature_column.embedding_column(item(), 2, capacity=capacity, placement=placement)
        stock = sok.feature_column.embedding_column(item(), 2, capacity=capacity)
        layers = [tf_keras.layers.DenseFeatures([c], name="net") for c in (column, stock)]
        again = tf_keras.layers.DenseFeatures.from_config(json.loads(json.dumps(layers[0].get_config())))
        again(features())
        nets = [layer(features()).numpy() for layer in layers]
        (table,), (copy,) = layers[0].trainable_weights, again.trainable_weights
        return nets[0].shape, table.placement, copy.placement, int(table.size())

    results = checked(run_world(2, program, monkeypatch))
    assert [r[:3] for r in results] == [((3, 2), placement, placement)] * 2
    owners = placement.owner_of(np.array([1, 2, 3]), 2)
    assert [r[3] for r in results] == np.bincount(owners, minlength=2).tolist()


@pytest.mark.parametrize(
    ("placement", "message"),
    [("hash", "`placement` must be sok.row_wise()"), (sok.row_wise(hash=True), "with `capacity`")],
)
def test_a_column_refuses_a_placement_at_once(placement, message):
    with pytest.raises(ValueError, match=saying(message)):
        sok.feature_column.embedding_column(item(), 2, placement=placement)
