"""DeepRec's input layers of `tf.contrib`, judged by stock TensorFlow's layers over matrices of the same rows."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.messages import saying

v1, fc, deeprec = tf.compat.v1, tf.feature_column, sok.deeprec
ours = sok.feature_column.embedding_column
BUCKETS = 10
WIDTHS = {"item": 3, "shop": 2}
ROWS = {name: np.random.default_rng(w).normal(size=[BUCKETS, w]).astype(np.float32) for name, w in WIDTHS.items()}
# Sequences of 3, 1, 0 and 2 steps; with two ids a step, of which one may be none.
FLAT = {
    "item": [[1, 2, 1], [3, -1, -1], [-1, -1, -1], [4, 1, -1]],
    "shop": [[5, 5, 2], [1, -1, -1], [-1, -1, -1], [3, 9, -1]],
}
IN_STEPS = {name: np.stack([rows, np.where(np.array(rows) > 2, -1, rows)], 2) for name, rows in FLAT.items()}
NUMBERS = [[0.5, 1.5, 2.5], [3.5, 0.0, 0.0], [0.0] * 3, [4.5, 5.5, 0.0]]


@pytest.fixture(autouse=True)
def clean():
    sok.Init()
    yield
    deeprec.uninstall()
    sok.feature_column.uninstall()
    sok.shutdown()


def sparse_of(rows):
    """Without the ids below 0, so that lengths are those of the sequences."""
    rows = np.array(rows)
    places = np.argwhere(rows >= 0)
    return tf.SparseTensor(places, tf.constant(rows[rows >= 0], tf.int64), rows.shape)


def of_numbers():
    lengths = [3, 1, 0, 2]
    places = [[b, t] for b, length in enumerate(lengths) for t in range(length)]
    return tf.SparseTensor(places, tf.constant([NUMBERS[b][t] for b, t in places], tf.float32), [4, 3])


def varied(output):
    factors = tf.sin(tf.cast(tf.range(tf.size(output)), tf.float32))
    return tf.reduce_sum(tf.reshape(output, [-1]) * factors)


def by_tensorflow(features, combiner, with_numbers):
    """The sequences, lengths, and the rows after a step of gradient descent, by tf_keras' SequenceFeatures."""
    columns = [
        fc.embedding_column(fc.sequence_categorical_column_with_identity(name, BUCKETS), width, combiner)
        for name, width in WIDTHS.items()
    ]
    columns += [fc.sequence_numeric_column("number")] if with_numbers else []
    layer = tf_keras.experimental.SequenceFeatures(columns)
    given = {name: sparse_of(rows) for name, rows in features.items()} | {"number": of_numbers()}
    layer(given)
    layer.set_weights([ROWS[name] for name in WIDTHS])
    with tf.GradientTape() as tape:
        net, lengths = layer(given)
        loss = varied(net)
    gradients = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, layer.trainable_variables)]
    return net.numpy(), lengths.numpy(), [ROWS[n] - g for n, g in zip(WIDTHS, gradients, strict=True)]


def any_ids(name):
    return deeprec.sequence_categorical_column_with_embedding(name, capacity=50)


def identity(name):
    return fc.sequence_categorical_column_with_identity(name, BUCKETS)


def in_session(features, columns, look_up, numbers=None):
    """What `look_up(features, columns)` gives in a v1 graph, and the rows after a step of gradient descent."""
    with tf.Graph().as_default(), v1.Session() as session:
        given = {name: sparse_of(rows) for name, rows in features.items()}
        if numbers is not None:
            given["number"] = of_numbers()
        output = look_up(given, columns)
        variables = v1.trainable_variables()
        tables, matrices = sok.split_embedding_variable_from_others(variables)
        net = output[0] if isinstance(output, tuple) else output
        train = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(1.0)).minimize(varied(net), var_list=variables)
        keys = tf.range(BUCKETS, dtype=tf.int64)
        name_of = {v: "item" if "item" in getattr(v, "table_name", v.name) else "shop" for v in [*tables, *matrices]}
        fill = [table.assign(keys, tf.constant(ROWS[name_of[table]])) for table in tables]
        fill += [v1.assign(matrix, ROWS[name_of[matrix]]) for matrix in matrices]
        after = {name_of[table]: table.sparse_read(keys) for table in tables}
        after |= {name_of[matrix]: tf.convert_to_tensor(matrix) for matrix in matrices}
        session.run(v1.global_variables_initializer())
        session.run(fill)
        found = session.run(output)
        session.run(train)
        after = session.run(after)
        return found, [after[name] for name in WIDTHS], [v.name for v in variables]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("features", "combiner"), [(FLAT, "mean"), (IN_STEPS, "sum")], ids=["one id a step", "two ids a step"]
)
@pytest.mark.parametrize("categorical", [identity, any_ids])
def test_sequences(categorical, features, grouped, combiner):
    expected, lengths, rows = by_tensorflow(features, combiner, True)
    with sok.group_embedding_column_scope() if grouped else contextlib.nullcontext():
        columns = [ours(categorical(name), WIDTHS[name], combiner) for name in ("shop", "item")]
    columns.insert(1, fc.sequence_numeric_column("number"))
    (net, found_lengths), after, names = in_session(features, columns, deeprec.sequence_input_layer, NUMBERS)
    assert names[0].startswith("sequence_input_layer/item_embedding/embedding_weights")
    np.testing.assert_allclose(net, expected, rtol=1e-5)
    assert found_lengths.tolist() == lengths.tolist() == [3, 1, 0, 2] and found_lengths.dtype == np.int64
    np.testing.assert_allclose(after[0], rows[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[1], rows[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grouped", [False, True])
def test_sequences_of_tensorflows_columns_beside_ours(grouped):
    expected, _, rows = by_tensorflow(FLAT, "mean", False)
    with sok.group_embedding_column_scope() if grouped else contextlib.nullcontext():
        columns = [ours(identity("item"), 3), fc.embedding_column(identity("shop"), 2)]
    (net, _), after, _ = in_session(FLAT, columns, deeprec.sequence_input_layer)
    np.testing.assert_allclose(net, expected, rtol=1e-5)
    np.testing.assert_allclose(after[0], rows[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[1], rows[1], rtol=1e-5, atol=1e-6)


def test_a_group_of_sequences_is_one_op():
    counts = []
    for grouped in (True, False):
        with tf.Graph().as_default() as graph:
            with sok.group_embedding_column_scope() if grouped else contextlib.nullcontext():
                columns = [ours(identity(name), WIDTHS[name]) for name in WIDTHS]
            deeprec.sequence_input_layer({name: sparse_of(rows) for name, rows in FLAT.items()}, columns)
            counts.append([op.type for op in graph.get_operations()].count("Sok>GroupLookup"))
    assert counts == [1, 2]


@pytest.mark.parametrize("feature", [[[1, -1, 2], [-1, -1, -1]], [[], []]], ids=["an id left out", "no steps"])
def test_ids_that_are_left_out_keep_their_place(feature):
    feature = np.array(feature, np.int64).reshape([2, -1])
    places = np.argwhere(feature < 99)
    given = tf.SparseTensor(places.reshape([-1, 2]), feature.reshape([-1]), feature.shape)
    column = ours(identity("item"), 2, initializer="ones")
    with tf.Graph().as_default(), v1.Session() as session:
        ids = tf.SparseTensor(given.indices.numpy(), given.values.numpy(), feature.shape)
        net, lengths = session.run(deeprec.sequence_input_layer({"item": ids}, [column]))
    assert net.shape == (*feature.shape, 2) and (net[:, :, 0] == (feature >= 0)).all()
    assert lengths.tolist() == [feature.shape[1]] * 2


def test_scopes_share_the_table():
    with tf.Graph().as_default():
        columns = [ours(any_ids("item"), 3)]
        for reuse in (False, True):
            with v1.variable_scope("tower", reuse=reuse):
                deeprec.sequence_input_layer({"item": sparse_of(FLAT["item"])}, columns, ["mine"], scope="in")
        (table,) = v1.trainable_variables()
        assert table.table_name == "tower/in/item_embedding/embedding_weights"
        deeprec.sequence_input_layer({"item": sparse_of(FLAT["item"])}, columns, trainable=False)
        assert v1.trainable_variables() == [table]


def test_sequences_without_lengths():
    columns = [ours(identity(name), WIDTHS[name]) for name in WIDTHS]
    expected, _, rows = by_tensorflow(FLAT, "mean", False)
    net, after, names = in_session(FLAT, columns, deeprec.sequence_input_from_feature_columns)
    assert names[0].startswith("sequence_input_from_feature_columns/item_embedding/")
    np.testing.assert_allclose(net, expected, rtol=1e-5)
    np.testing.assert_allclose(after[0], rows[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grouped", [False, True])
def test_input_from_feature_columns_is_input_layer(grouped):
    def columns_of(make):
        return [make(fc.categorical_column_with_identity(name, BUCKETS), width) for name, width in WIDTHS.items()]

    with sok.group_embedding_column_scope() if grouped else contextlib.nullcontext():
        columns = columns_of(ours)
    outputs = {}
    stock = in_session(FLAT, columns_of(fc.embedding_column), v1.feature_column.input_layer)
    deeprec.install()

    def both(given, columns):
        return tf.contrib.layers.input_from_feature_columns(given, columns, cols_to_outs=outputs)

    for look_up, called in ((both, "input_from_feature_columns"), (tf.feature_column.input_layer, "input_layer")):
        net, after, names = in_session(FLAT, columns, look_up)
        assert names[0].startswith(f"{called}/item_embedding/embedding_weights")
        np.testing.assert_allclose(net, stock[0], rtol=1e-5)
        np.testing.assert_allclose(after[0], stock[1][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after[1], stock[1][1], rtol=1e-5, atol=1e-6)
    assert set(outputs) == set(columns)


def test_installed_columns_of_any_ids_are_of_sequences():
    deeprec.install()
    with tf.Graph().as_default(), v1.Session() as session:
        item = tf.feature_column.sequence_categorical_column_with_embedding("item")
        column = tf.feature_column.embedding_column(item, 2, initializer=v1.ones_initializer())
        net, lengths = tf.contrib.feature_column.sequence_input_layer({"item": [[2**40, 3], [5, -1]]}, [column])
        assert session.run(net)[:, :, 0].tolist() == [[1, 1], [1, 0]] and session.run(lengths).tolist() == [2, 1]


# What is refused.


def test_columns_that_have_no_place():
    features = {"item": sparse_of(FLAT["item"])}
    flat = fc.categorical_column_with_identity("item", BUCKETS)
    for layer in (deeprec.sequence_input_layer, deeprec.sequence_input_from_feature_columns):
        with tf.Graph().as_default(), pytest.raises(ValueError, match=saying("`feature_columns`", "of sequences")):
            layer(features, [fc.numeric_column("item")])
        with tf.Graph().as_default(), pytest.raises(ValueError, match=saying("'item_embedding'", "sequence_")):
            layer(features, [ours(flat, 2)])
        for columns in ([], [ours(identity("item"), 2), ours(identity("item"), 3)]):
            with (
                tf.Graph().as_default(),
                pytest.raises(ValueError, match=saying("`feature_columns`", "different names")),
            ):
                layer(features, columns)
    parts = ("'item_embedding'", "sequence_input_layer", "SequenceFeatures", "Received: Sequence")
    with tf.Graph().as_default(), pytest.raises(ValueError, match=saying(*parts)):
        deeprec.input_from_feature_columns(features, [ours(identity("item"), 2)])


def test_arguments_that_are_refused():
    columns = [ours(fc.categorical_column_with_identity("item", BUCKETS), 2)]
    with pytest.raises(ValueError, match=saying("`cols_to_outs`", "a dict", "Received: []")):
        deeprec.input_from_feature_columns({}, columns, cols_to_outs=[])
    with pytest.raises(ValueError, match=saying("`blocknums` must be None", "Received: 1")):
        deeprec.input_from_feature_columns({}, columns, blocknums=1)
    with pytest.raises(ValueError, match=saying("`dtype`", "hash others")):
        deeprec.sequence_categorical_column_with_embedding("item", tf.string)


def test_sequences_of_different_lengths():
    columns = [ours(identity(name), WIDTHS[name]) for name in WIDTHS]
    with tf.Graph().as_default(), v1.Session() as session:
        features = {"item": sparse_of([[1, 2], [3, 4]]), "shop": sparse_of([[1, 1], [1, -1]])}
        net, lengths = deeprec.sequence_input_layer(features, columns)
        assert session.run(net).shape == (2, 2, 5)
        with pytest.raises(tf.errors.InvalidArgumentError, match="must have sequences of the same lengths"):
            session.run(lengths)
        # Of that much TensorFlow knows before it runs.
        features["shop"] = sparse_of([[1], [1]])
        with pytest.raises(ValueError, match="Dimension 1 in both shapes must be equal"):
            deeprec.sequence_input_from_feature_columns(features, columns, scope="known")
        for name, ids in features.items():
            shape = v1.placeholder_with_default(ids.dense_shape, [2])
            features[name] = tf.SparseTensor(ids.indices, ids.values, shape)
        net = deeprec.sequence_input_from_feature_columns(features, columns, scope="unknown")
        with pytest.raises(tf.errors.InvalidArgumentError, match="ConcatOp"):
            session.run(net)
