"""Columns that are looked up as a group: the same variables, values and gradients as without."""

import contextlib
import threading

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.feature_column import feature_column as fc_v1
from tensorflow.python.feature_column import feature_column_v2 as fc_v2

import sok
from tests.messages import saying

fc = tf.feature_column
v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("feature_columns")


def scope_if(grouped, **options):
    return sok.group_embedding_column_scope(**options) if grouped else contextlib.nullcontext()


def columns_of_all_kinds(grouped):
    """All kinds of categorical columns under embeddings, with ids below 0, weights of 0 and less, and empty samples."""
    with scope_if(grouped):
        columns = [
            fc.embedding_column(fc.categorical_column_with_hash_bucket("hashed", 20), 4),
            fc.embedding_column(fc.categorical_column_with_identity("identity", 10), 3, combiner="sum"),
            fc.embedding_column(fc.categorical_column_with_vocabulary_list("words", ["x", "y"]), 3, combiner="sqrtn"),
            fc.embedding_column(fc.crossed_column(["hashed", "words"], 30), 8),
            *(
                fc.embedding_column(
                    fc.weighted_categorical_column(fc.categorical_column_with_identity(f"w_{c}", 10), f"weight_{c}"),
                    5,
                    combiner=c,
                )
                for c in ("sum", "mean", "sqrtn")
            ),
        ]
    outside = [
        fc.numeric_column("number"),
        fc.indicator_column(fc.categorical_column_with_identity("indicated", 4)),
        fc.embedding_column(fc.categorical_column_with_identity("outside", 10), 2),
    ]
    return [outside[0], *columns[::-1], *outside[1:]]


def features_of_all_kinds():
    def sparse(rows):
        return tf.sparse.from_dense(tf.constant(rows))

    weighted = {f"w_{c}": sparse([[1, 2], [3, 0], [4, 5]]) for c in ("sum", "mean", "sqrtn")}
    weights = {f"weight_{c}": sparse([[1.0, -2.0], [0.5, 0.0], [1.0, 2.0]]) for c in ("sum", "mean", "sqrtn")}
    return {
        "hashed": tf.constant([["p"], ["q"], [""]]),
        "identity": tf.constant([[1, -1], [2, 3], [-1, -1]]),
        "words": tf.constant([["x", "unknown"], ["unknown", ""], ["y", "x"]]),
        "number": tf.constant([[1.0], [2.0], [3.0]]),
        "indicated": tf.constant([[1], [2], [3]]),
        "outside": tf.constant([[1], [2], [3]]),
        **weighted,
        **weights,
    }


def types_of(graph):
    return [op.type for op in graph.get_operations()]


def run_v1(make_columns, features, network=None, **options):
    """Names of the variables, and what a session gives: the layer, and gradients of its square in all variables."""
    with tf.Graph().as_default() as graph, v1.Session() as session:
        columns = make_columns()
        cols_to_vars, cols_to_outputs = {}, {}
        if network is None:
            options |= {"cols_to_vars": cols_to_vars, "cols_to_output_tensors": cols_to_outputs}
        net = (network or v1.feature_column.input_layer)(features(), columns, **options)
        variables = v1.global_variables()
        gradients = [tf.convert_to_tensor(g) for g in tf.gradients(tf.reduce_sum(net**2), variables)]
        session.run(v1.tables_initializer())
        for i, variable in enumerate(variables):
            session.run(variable.assign(np.random.default_rng(i).normal(size=variable.shape).astype(np.float32)))
        values = session.run([net, *gradients, *[cols_to_outputs[c] for c in sorted(cols_to_outputs, key=str)]])
        names = [v.name for v in variables], {c.name: [v.name for v in of] for c, of in cols_to_vars.items()}
        collected = [v.name for v in v1.get_collection(v1.GraphKeys.MODEL_VARIABLES)]
        return (*names, collected), values, types_of(graph)


def check_same(first, second):
    assert first[0] == second[0]
    assert len(first[1]) == len(second[1])
    for a, b in zip(first[1], second[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_resource", [True, False])
def test_input_layer_of_a_scope_is_that_without(use_resource):
    def network(features, columns):
        with v1.variable_scope("model", use_resource=use_resource):
            return v1.feature_column.input_layer(features, columns)

    plain, grouped = (
        run_v1(lambda g=grouped: columns_of_all_kinds(g), features_of_all_kinds, network) for grouped in (False, True)
    )
    check_same(plain, grouped)
    op = "Sok>VariablePool" if use_resource else "Sok>TensorPool"
    assert (plain[2].count(op), grouped[2].count(op)) == (0, 1)


def test_input_layer_says_which_column_has_which_variables_and_outputs():
    check_same(*(run_v1(lambda g=g: columns_of_all_kinds(g), features_of_all_kinds) for g in (False, True)))


def shared_v1(grouped):
    with scope_if(grouped):
        categorical = [fc.categorical_column_with_identity(name, 10) for name in ("first", "second")]
        return v1.feature_column.shared_embedding_columns(categorical, 2)


def shared_features():
    return {"first": tf.constant([[1, 2], [3, -1]]), "second": tf.constant([[3, 3], [2, 1]])}


def test_shared_columns_of_v1_share_their_variable():
    plain, grouped = (run_v1(lambda g=g: shared_v1(g), shared_features) for g in (False, True))
    check_same(plain, grouped)
    assert len(plain[0][0]) == 1 and grouped[2].count("Sok>VariablePool") == 1


def test_a_layer_object_reuses_its_variables():
    def network(features, columns):
        layer = fc_v1.InputLayer(columns, name="twice")
        return layer(features) + 2.0 * layer(features)

    check_same(*(run_v1(lambda g=g: columns_of_all_kinds(g), features_of_all_kinds, network) for g in (False, True)))


def test_scopes_coexist_and_nest():
    def columns():
        def column(name):
            return fc.embedding_column(fc.categorical_column_with_identity(name, 10), 2)

        with sok.group_embedding_column_scope(name="outer"):
            made = [column("a"), column("b")]
            with sok.group_embedding_column_scope():
                made.append(column("c"))
            made.append(column("d"))
        with sok.group_embedding_column_scope(params_num_per_group=1):
            made += [column("e"), column("f")]
        return made

    _, _, types = run_v1(columns, lambda: {name: tf.constant([[1], [2]]) for name in "abcdef"})
    assert types.count("Sok>VariablePool") == 4  # a, b, d; c; e; f


def test_what_a_group_cannot_do_stays_tensorflows():
    def columns(grouped):
        with scope_if(grouped):
            return [
                fc.embedding_column(fc.categorical_column_with_identity("first", 10), 2, max_norm=0.5),
                fc.embedding_column(fc.categorical_column_with_identity("second", 10), 3),
            ]

    def split(features, columns):
        with v1.variable_scope("model", partitioner=v1.fixed_size_partitioner(2)):
            return v1.feature_column.input_layer(features, columns)

    plain, grouped = (run_v1(lambda g=g: columns(g), shared_features) for g in (False, True))
    check_same(plain, grouped)
    assert grouped[2].count("Sok>VariablePool") == 1
    plain, grouped = (run_v1(lambda g=g: columns(g), shared_features, split) for g in (False, True))
    check_same(plain, grouped)
    assert grouped[2].count("Sok>VariablePool") == 0


def test_a_column_in_two_layers_is_looked_up_where_it_is():
    """Two towers that share a scope, and the features: each makes its own variables, under TensorFlow's names."""

    def network(features, columns):
        columns = [c for c in columns if "embedding" in c.name]
        with v1.variable_scope("wide"):
            first = v1.feature_column.input_layer(features, columns[:2])
        with v1.variable_scope("deep"):
            return tf.concat([first, v1.feature_column.input_layer(features, columns[2:])], 1)

    plain, grouped = (
        run_v1(lambda g=g: columns_of_all_kinds(g), features_of_all_kinds, network) for g in (False, True)
    )
    check_same(plain, grouped)
    assert grouped[2].count("Sok>VariablePool") == 2


def test_uninstall_gives_tensorflows_input_layer_back():
    sok.feature_column.uninstall()
    original = fc_v1._internal_input_layer
    grouped = run_v1(lambda: columns_of_all_kinds(True), features_of_all_kinds)
    assert fc_v1._internal_input_layer is not original
    sok.feature_column.uninstall()
    sok.feature_column.uninstall()
    assert fc_v1._internal_input_layer is original

    def then_uninstalled():
        columns = columns_of_all_kinds(True)
        sok.feature_column.uninstall()
        return columns

    one_by_one = run_v1(then_uninstalled, features_of_all_kinds)
    check_same(grouped, one_by_one)
    assert one_by_one[2].count("Sok>VariablePool") == 0


def test_the_classes_of_tensorflow_are_as_before_after_a_scope():
    classes = (fc_v2.EmbeddingColumn, fc_v2.SharedEmbeddingColumn, fc_v1._SharedEmbeddingColumn)
    before = [cls.__dict__.get("__new__") for cls in classes]
    seen = []
    with sok.group_embedding_column_scope():
        column = fc.embedding_column(fc.categorical_column_with_identity("a", 10), 2)

        def elsewhere():
            seen.append(fc.embedding_column(fc.categorical_column_with_identity("a", 10), 2))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert [cls.__dict__.get("__new__") for cls in classes] == before
    assert type(seen[0]) is fc_v2.EmbeddingColumn
    assert type(column) is not fc_v2.EmbeddingColumn and isinstance(column, fc_v2.EmbeddingColumn)
    assert type(fc.embedding_column(column.categorical_column, 2)) is fc_v2.EmbeddingColumn


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_misuse_of_the_scope(value):
    refuses = pytest.raises(ValueError, match=saying("`params_num_per_group`", "None or a whole number"))
    with refuses, sok.group_embedding_column_scope(params_num_per_group=value):
        pass
    assert type(fc.embedding_column(fc.categorical_column_with_identity("a", 10), 2)) is fc_v2.EmbeddingColumn


def shared_v2(grouped):
    with scope_if(grouped):
        categorical = [fc.categorical_column_with_identity(name, 10) for name in ("first", "second")]
        return fc.shared_embeddings(categorical, 2, initializer=tf.ones_initializer())


def dense_features(columns, seed=0):
    layer = tf_keras.layers.DenseFeatures(columns)
    layer(features_of_all_kinds())
    layer.set_weights([np.random.default_rng(i).normal(size=w.shape) for i, w in enumerate(layer.weights, seed)])
    return layer


def test_dense_features_of_a_scope_are_those_without(call):
    results = []
    for grouped in (False, True):
        layer = dense_features(columns_of_all_kinds(grouped))

        def step(layer=layer):
            with tf.GradientTape() as tape:
                net = layer(features_of_all_kinds())
                loss = tf.reduce_sum(net**2)
            gradients = tape.gradient(loss, layer.trainable_weights)
            return net, [tf.convert_to_tensor(g) for g in gradients]

        net, gradients = call(step)
        results.append(([w.name.split("/", 1)[1] for w in layer.weights], [net, *gradients]))
    check_same(*results)


def test_dense_features_look_a_group_up_at_once():
    layer = dense_features(columns_of_all_kinds(True))
    graph = tf.function(lambda: layer(features_of_all_kinds())).get_concrete_function().graph
    assert types_of(graph).count("Sok>VariablePool") == 1


def test_shared_embeddings_of_dense_features():
    """In graphs alone: TensorFlow makes no such columns when executing eagerly."""

    def network(features, columns):
        return tf_keras.layers.DenseFeatures(columns)(features)

    plain, grouped = (run_v1(lambda g=g: shared_v2(g), shared_features, network) for g in (False, True))
    check_same(plain, grouped)
    assert len(plain[0][0]) == 1 and grouped[2].count("Sok>VariablePool") == 1


def test_a_model_fits_alike():
    losses = []
    for grouped in (False, True):
        model = tf_keras.Sequential([dense_features(columns_of_all_kinds(grouped)), tf_keras.layers.Dense(1)])
        model(features_of_all_kinds())
        model.layers[1].set_weights([np.full([40, 1], 0.1), np.zeros(1)])
        model.compile(tf_keras.optimizers.Adam(0.1), "mse")
        data = tf.data.Dataset.from_tensors((features_of_all_kinds(), tf.constant([[1.0], [2.0], [3.0]]))).repeat(5)
        losses.append(model.fit(data, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_saved_configuration_is_tensorflows():
    layer = dense_features(columns_of_all_kinds(True))
    again = tf_keras.layers.DenseFeatures.from_config(layer.get_config())
    again(features_of_all_kinds())
    again.set_weights(layer.get_weights())
    np.testing.assert_allclose(again(features_of_all_kinds()), layer(features_of_all_kinds()), rtol=1e-5)


def test_an_id_that_is_no_row_names_the_variable():
    layer = dense_features(columns_of_all_kinds(True))
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("identity_embedding", "id 10 is outside [0, 10)")):
        layer({**features_of_all_kinds(), "identity": tf.constant([[1], [10], [2]])})


UNSAFE_IDS = [[1, 2], [-1, -1], [3, 4], [5, 5], [6, -1]]  # -1: no id
UNSAFE_WEIGHTS = [[1.0, -2.0], [0.0, 0.0], [0.5, 0.0], [1.0, -1.0], [-3.0, 0.0]]


UNSAFE_ROWS = np.arange(1.0, 31.0).reshape(10, 3)


def unsafe_columns(grouped, make=fc.embedding_column, **options):
    options = options or {"initializer": v1.constant_initializer(UNSAFE_ROWS)}

    def column(combiner):
        ids = fc.categorical_column_with_identity(f"ids_{combiner}", 10)
        weighted = fc.weighted_categorical_column(ids, f"weights_{combiner}")
        return make(weighted, 3, combiner=combiner, use_safe_embedding_lookup=False, **options)

    with scope_if(grouped):
        return [column(combiner) for combiner in ("sum", "mean", "sqrtn")]


def unsafe_features(last=5):
    where = [[s, p] for s in range(last) for p in range(2) if UNSAFE_IDS[s][p] >= 0]
    weights = tf.SparseTensor(where, [UNSAFE_WEIGHTS[s][p] for s, p in where], [5, 2])
    ids = tf.SparseTensor(where, [UNSAFE_IDS[s][p] for s, p in where], [5, 2])
    return {f"{what}_{c}": of for c in ("sum", "mean", "sqrtn") for what, of in (("ids", ids), ("weights", weights))}


def test_unsafe_columns_use_weights_of_any_sign_as_tensorflow_does():
    plain, grouped = (tf_keras.layers.DenseFeatures(unsafe_columns(g))(unsafe_features()) for g in (False, True))
    np.testing.assert_allclose(grouped, plain, rtol=1e-6)
    by_combiner = dict(zip(("mean", "sqrtn", "sum"), np.split(grouped.numpy(), 3, 1), strict=True))
    rows = UNSAFE_ROWS
    np.testing.assert_allclose(by_combiner["sum"][0], rows[1] - 2 * rows[2])
    np.testing.assert_allclose(by_combiner["mean"][0], (rows[1] - 2 * rows[2]) / -1)
    np.testing.assert_allclose(by_combiner["sqrtn"][4], -rows[6])
    for output in by_combiner.values():
        assert not output[1].any() and (by_combiner["mean"][3] == 0).all()  # no ids; weights that cancel


def test_unsafe_columns_keep_empty_samples_at_the_end_which_tensorflow_drops():
    features = unsafe_features(last=3)
    plain, grouped = (tf_keras.layers.DenseFeatures(unsafe_columns(g))(features).numpy() for g in (False, True))
    assert plain.shape == (3, 9) and grouped.shape == (5, 9)
    np.testing.assert_allclose(grouped[:3], plain, rtol=1e-6)
    assert not grouped[3:].any()


@pytest.mark.parametrize("grouped", [False, True])
def test_unsafe_columns_refuse_ids_below_0(grouped):
    with scope_if(grouped):
        ids = fc.categorical_column_with_identity("ids", 10)
        layer = tf_keras.layers.DenseFeatures([fc.embedding_column(ids, 3, use_safe_embedding_lookup=False)])
    bad = tf.SparseTensor([[0, 0], [1, 0]], [1, -1], [2, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="-1"):
        layer({"ids": bad})


def test_unsafe_columns_are_safe_where_tensorflow_does_not_know_the_rank():
    def run(grouped):
        with tf.Graph().as_default(), v1.Session() as session:
            with scope_if(grouped):
                ids = fc.categorical_column_with_identity("ids", 10)
                initializer = v1.ones_initializer()
                column = fc.embedding_column(ids, 3, initializer=initializer, use_safe_embedding_lookup=False)
            given = v1.sparse_placeholder(tf.int64)
            net = v1.feature_column.input_layer({"ids": given}, [column])
            session.run(v1.global_variables_initializer())
            return session.run(net, {given: v1.SparseTensorValue([[0, 0], [1, 0]], [1, -1], [2, 1])})

    np.testing.assert_array_equal(run(True), run(False))


@pytest.mark.parametrize("capacity", [None, 100])
def test_unsafe_columns_of_tables_use_weights_of_any_sign(capacity):
    columns = unsafe_columns(True, sok.feature_column.embedding_column, initializer="ones", capacity=capacity)
    sums = tf_keras.layers.DenseFeatures(columns)(unsafe_features())[:, -1]  # by name: mean, sqrtn, sum
    np.testing.assert_allclose(sums, [-1.0, 0.0, 0.5, 0.0, -3.0])
    ids = fc.categorical_column_with_identity("ids", 10)
    layer = tf_keras.layers.DenseFeatures(
        [sok.feature_column.embedding_column(ids, 1, "sum", "ones", use_safe_embedding_lookup=False, capacity=capacity)]
    )
    below = {"ids": tf.SparseTensor([[0, 0], [0, 1]], [1, -1], [1, 2])}
    if capacity is None:
        with pytest.raises(tf.errors.InvalidArgumentError, match="key -1 is outside"):
            layer(below)
    else:
        assert layer(below).numpy().tolist() == [[2.0]]
