"""Models of Keras 3 and tf_keras, exported and loaded by a process that has no `sok`: they predict as in training."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.layers import for_keras
from tests.messages import saying

TOLERANCE = 1e-6


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


def keras_model(library, form, weighted):
    layers = for_keras(library)
    options = {"shape": (2, None), "dtype": "int64", "name": "ids"}
    ids = library.Input(**{**options, **({} if form == "dense" else {form: True})})
    inputs = [ids]
    pooled = layers.DistributedEmbedding("mean", 100, 4, slot_num=2, max_nnz=3, name="pooled")
    if weighted:
        inputs.append(
            library.Input(shape=(2, None), dtype="float32", name="weights", **({form: True} if form != "dense" else {}))
        )
    x = pooled(ids, weights=inputs[1]) if weighted else pooled(ids)
    dense_ids = library.Input((2,), dtype="int64", name="dense_ids")
    y = layers.All2AllDenseEmbedding(100, 3, slot_num=2, nnz_per_slot=1, name="rows")(dense_ids)
    x = library.layers.Concatenate()([library.layers.Flatten()(x), library.layers.Flatten()(y)])
    x = library.layers.Dense(3, "tanh")(x)
    return library.Model([*inputs, dense_ids], library.layers.Dense(1, name="score")(x))


IDS = [[[1, -2, 3], [4]], [[], [1, 99]], [[2**62], [5, 5]]]
WEIGHTS = [[[1.0, 2.0, 0.5], [1.5]], [[], [3.0, 1.0]], [[1.0], [0.0, 2.0]]]


def parts(name, form, values, dtype):
    """The tensors of one input, and the input."""
    ragged = tf.ragged.constant(values, dtype, ragged_rank=2, row_splits_dtype=tf.int64)
    if form == "ragged":
        outer, inner = ragged.nested_row_splits
        return {
            f"{name}_values": ragged.flat_values,
            f"{name}_row_splits_0": outer,
            f"{name}_row_splits_1": inner,
        }, ragged
    sparse = ragged.to_sparse()
    return {f"{name}_{part}": getattr(sparse, part) for part in ("indices", "values", "dense_shape")}, sparse


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_keras_models_with_ragged_and_sparse_inputs(stranger, path, library, form, weighted):
    model = keras_model(library, form, weighted)
    flat, ids = parts("ids", form, IDS, tf.int64)
    given = [ids]
    if weighted:
        of_weights, weights = parts("weights", form, WEIGHTS, tf.float32)
        flat, given = {**flat, **of_weights}, [ids, weights]
    dense_ids = np.array([[1, 2], [3, 1], [-1, 2]])
    given.append(tf.constant(dense_ids))
    model(given, training=True)  # makes rows
    for layer in model.layers:
        if hasattr(layer, "embedding_variable"):
            keys, rows = layer.embedding_variable.export()
            layer.embedding_variable.assign(keys, rows * 10)
    report = sok.export_saved_model(model, path)
    assert {table.name.rpartition("_")[0] or table.name for table in report.tables}
    answer = stranger.predict(path, {**{k: v.numpy() for k, v in flat.items()}, "dense_ids": dense_ids})
    np.testing.assert_allclose(answer["score"], model(given, training=False), rtol=0, atol=TOLERANCE)


def test_a_sequential_model_and_a_subclass_of_each_keras(stranger, tmp_path):
    for library in (keras, tf_keras):
        layers = for_keras(library)

        class Subclassed(library.Model):
            def __init__(self, layers=layers, library=library):
                super().__init__()
                self.embedding = layers.DistributedEmbedding("sum", 50, 4, 2, 1, embedding_initializer="normal")
                self.dense = library.layers.Dense(1)

            def call(self, inputs, training=False):
                return {"score": self.dense(tf.reshape(self.embedding(inputs["ids"], training=training), [-1, 8]))}

        ids = np.array([[1, 2], [3, 4]])
        model = Subclassed()
        model({"ids": tf.constant(ids)})
        folder = tmp_path / library.__name__
        spec = {"ids": tf.TensorSpec([None, 2], tf.int64)}
        sok.export_saved_model(model, folder / "subclass", signatures=spec)
        answer = stranger.predict(folder / "subclass", {"ids": ids + 2})["score"]
        np.testing.assert_allclose(answer, model({"ids": tf.constant(ids + 2)})["score"], atol=TOLERANCE)
        sequential = library.Sequential(
            [
                library.Input((2,), dtype="int64", name="numbers"),
                layers.All2AllDenseEmbedding(50, 4, 2, 1, embedding_initializer="normal"),
                library.layers.Flatten(),
                library.layers.Dense(1, name="out"),
            ]
        )
        sok.export_saved_model(sequential, folder / "sequential")
        (answer,) = stranger.predict(folder / "sequential", {"numbers": ids}).values()
        np.testing.assert_allclose(answer, sequential(tf.constant(ids), training=False), atol=TOLERANCE)
        assert int(sequential.layers[0].embedding_variable.size()) == 0


def test_feature_columns_and_lookup_tables_of_keras(stranger, path):
    fc = tf.feature_column
    with sok.group_embedding_column_scope():
        item = fc.categorical_column_with_identity("item", 10)
        user = fc.categorical_column_with_hash_bucket("user", 100, dtype=tf.int64)
        columns = [
            sok.feature_column.embedding_column(item, 3, combiner="sum"),
            sok.feature_column.embedding_column(user, 2, combiner="mean", capacity=1000),
            fc.embedding_column(fc.categorical_column_with_identity("other", 5), 4),
        ]
    inputs = {
        "item": tf_keras.Input((None,), dtype="int64", name="item"),
        "user": tf_keras.Input((None,), dtype="int64", name="user"),
        "other": tf_keras.Input((None,), dtype="int64", name="other"),
    }
    word = tf_keras.Input((1,), dtype="string", name="word")
    words = tf_keras.layers.StringLookup(vocabulary=["a", "b"])(word)
    more = for_keras(tf_keras).All2AllDenseEmbedding(50, 4, 1, 1)(words)
    x = tf_keras.layers.Concatenate()([tf_keras.layers.DenseFeatures(columns)(inputs), tf_keras.layers.Flatten()(more)])
    model = tf_keras.Model({**inputs, "word": word}, tf_keras.layers.Dense(2, name="out")(x))
    given = {
        "item": tf.constant([[1, 2], [-1, -1], [3, -1]], tf.int64),
        "user": tf.constant([[1, 1], [2, 3], [4, -1]], tf.int64),
        "other": tf.constant([[4], [-1], [0]], tf.int64),
        "word": tf.constant([["a"], ["b"], ["c"]]),
    }
    model(given, training=True)
    sok.export_saved_model(model, path)
    for in_session in (False, True):
        answer = stranger.predict(path, {name: x.numpy() for name, x in given.items()}, in_session=in_session)["out"]
        np.testing.assert_allclose(answer, model(given, training=False), rtol=0, atol=TOLERANCE)
    sok.feature_column.uninstall()


def test_malformed_requests_are_refused_and_others_go_on(stranger, path):
    model = keras_model(keras, "ragged", weighted=False)
    sok.export_saved_model(model, path)
    good = {"ids_values": np.arange(4), "ids_row_splits_0": np.array([0, 2]), "ids_row_splits_1": np.array([0, 1, 4])}
    good["dense_ids"] = np.array([[1, 2]])
    assert stranger.predict(path, good)["score"].shape == (1, 1)
    bad = [
        ({"ids_values": np.arange(5), "ids_row_splits_1": np.array([0, 1, 5])}, "more than max_nnz = 3 keys"),
        ({"ids_row_splits_1": np.array([0, 3, 1])}, "must be|negative|monotonic|partition"),
        ({"ids_row_splits_0": np.array([0, 1, 2])}, "slot_num|row_splits|partition|batch"),
    ]
    for change, text in bad:
        with pytest.raises(RuntimeError, match=f"(?s)InvalidArgumentError.*({text})"):
            stranger.predict(path, {**good, **change})
    assert stranger.predict(path, good)["score"].shape == (1, 1)


def test_sparse_indices_in_any_order_and_outside(stranger, path):
    model = keras_model(keras, "sparse", weighted=True)
    sok.export_saved_model(model, path)
    indices = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
    inputs = {"dense_ids": np.array([[1, 2], [3, 4]])}
    for name, values in (("ids", np.array([7, 8, 9, 10])), ("weights", np.array([1, 2, 3, 4], "f"))):
        inputs |= {f"{name}_indices": indices, f"{name}_values": values, f"{name}_dense_shape": np.array([2, 2, 2])}
    answer = stranger.predict(path, inputs)["score"]
    order = np.lexsort(indices.T[::-1])
    ordered = {k: x[order] if k.startswith(("ids_", "weights_")) and "shape" not in k else x for k, x in inputs.items()}
    np.testing.assert_allclose(answer, stranger.predict(path, ordered)["score"], atol=TOLERANCE)
    with pytest.raises(RuntimeError, match=saying("InvalidArgumentError", "outside its dense_shape")):
        stranger.predict(
            path, {**inputs, "ids_indices": indices + [[5, 0, 0]], "weights_indices": indices + [[5, 0, 0]]}
        )
