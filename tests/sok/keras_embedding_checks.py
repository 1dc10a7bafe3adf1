"""`sok.Embedding` under `tf.keras`, judged by Keras' own layer: see keras_checks.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.keras.layers.base import TableLayerMixin
from tests.messages import saying
from tests.sok.keras_checks import IS_KERAS_3

keras = tf.keras
ROWS, DIM = 200, 4
MATRIX = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype("float32")
PLAIN = {"table": {}, "variable": {"sparse_as_dense_size": 1000}}
IDS = {
    "scalar": tf.constant(7),
    "vector": tf.constant([3, 1, 3], tf.int64),
    "matrix": tf.constant([[3, 1], [0, 199]], tf.int32),
    "cube": tf.constant(np.arange(12).reshape(2, 3, 2)),
    "floats": tf.constant([[3.0, 199.0]]),
    "bytes": tf.constant([[3, 199]], tf.uint8),
    "empty": tf.zeros([0, 3], tf.int64),
    "ragged": tf.ragged.constant([[3, 1], [], [199]]),
    "ragged twice": tf.ragged.constant([[[3, 1], []], [[199]]], dtype=tf.int64),
    "sparse": tf.SparseTensor([[0, 1], [2, 0]], [3, 199], [3, 2]),
}


def stock(**kwargs):
    layer = keras.layers.Embedding(ROWS, DIM, **kwargs)
    layer.build((None,))
    layer.set_weights([MATRIX])
    return layer


def as_lists(rows):
    return rows.to_list() if isinstance(rows, tf.RaggedTensor) else rows.numpy().tolist()


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("kind", PLAIN)
def check_rows_are_those_of_keras_for_ids_of_any_shape(ids, kind):
    ours = sok.Embedding(ROWS, DIM, weights=MATRIX, **PLAIN[kind])
    assert as_lists(ours(IDS[ids])) == as_lists(stock()(IDS[ids]))
    assert isinstance(ours, keras.layers.Embedding)


@pytest.mark.parametrize("kind", PLAIN)
def check_gradients_are_those_of_keras(kind):
    ids = tf.constant([[3, 1], [3, 199]])
    found = []
    for layer in (stock(), sok.Embedding(ROWS, DIM, weights=MATRIX, **PLAIN[kind])):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 3)
        variable = layer.trainable_variables[0]
        slices = tape.gradient(loss, variable)
        if kind == "table" and isinstance(layer, type(sok.Embedding)):
            assert variable is layer.embedding_variable
        found.append(slices)
    keys, _ = layer.embedding_variable.export() if kind == "table" else (tf.range(ROWS), None)
    expected, came = (np.zeros([ROWS, DIM], "float32") for _ in range(2))
    np.add.at(expected, np.asarray(found[0].indices), np.asarray(found[0].values))
    np.add.at(came, np.asarray(keys)[np.asarray(found[1].indices)], np.asarray(found[1].values))
    np.testing.assert_allclose(came, expected, rtol=1e-6)


def classifier(layer):
    ids = keras.Input((3,), dtype="int64")
    dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    return keras.Model(ids, dense(keras.layers.GlobalAveragePooling1D()(layer(ids))))


@pytest.mark.parametrize("mask_zero", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def check_fit_and_evaluate_are_those_of_keras(optimizer, mask_zero):
    ids = np.random.default_rng(1).permutation(ROWS)[:180].reshape(60, 3)
    ids[:20] = np.random.default_rng(2).permutation(60).reshape(20, 3)  # id 0 is among them
    labels = (ids.sum(axis=1) % 2).astype("float32")
    results = []
    for layer in (stock(mask_zero=mask_zero), sok.Embedding(ROWS, DIM, weights=MATRIX, mask_zero=mask_zero)):
        model = classifier(layer)
        inner = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.1}})
        model.compile(inner if not results else sok.DistributedOptimizer(inner), "mse")
        # No id comes twice in a batch: Keras 3's Adagrad would square the parts of its gradient, and not their sum.
        losses = model.fit(ids, labels, batch_size=20, epochs=4, shuffle=False, verbose=0).history["loss"]
        results.append((losses, model.evaluate(ids, labels, verbose=0), layer.get_weights()[0]))
    assert results[1][0][-1] < results[1][0][0]
    for came, expected in zip(*results, strict=True):
        np.testing.assert_allclose(came, expected, rtol=1e-5, atol=1e-6)


PENALTIES = {
    "l1": keras.regularizers.L1(0.02),
    "l2": keras.regularizers.L2(0.03),
    "both": keras.regularizers.L1L2(0.01, 0.02),
    "one's own": lambda rows: 0.01 * tf.reduce_sum(rows**4),
}


def trained(layer, ids, **options):
    """Trains it for as many steps as there are batches of ids [steps, 20, 3]: losses, and the matrix."""
    model = classifier(layer)
    inner = keras.optimizers.get({"class_name": options.pop("optimizer", "SGD"), "config": {"learning_rate": 0.1}})
    is_ours, callbacks = isinstance(layer, TableLayerMixin), options.pop("callbacks", None)
    model.compile(sok.DistributedOptimizer(inner) if is_ours else inner, "mse", **options)
    ids = ids.reshape(-1, 3)
    labels = (ids.sum(axis=1) % 2).astype("float32")
    fitted = model.fit(ids, labels, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    losses = fitted.history["loss"]
    return losses, layer.get_weights()[0]


@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop"])
@pytest.mark.parametrize("penalty", PENALTIES)
def check_a_penalty_is_that_of_keras_where_a_batch_has_all_rows(penalty, optimizer):
    rng, n = np.random.default_rng(3), 50
    # Each row at least once in a batch, and some twice.
    ids = np.stack([np.concatenate([rng.permutation(n), rng.integers(0, n, 10)]) for _ in range(3)])
    results = []
    for make in (keras.layers.Embedding, lambda *args, **kw: sok.Embedding(*args, sparse_as_dense_size=0, **kw)):
        layer = make(n, DIM, embeddings_regularizer=PENALTIES[penalty])
        layer.build((None, 3))
        layer.set_weights([MATRIX[:n]])
        results.append(trained(layer, ids, optimizer=optimizer))
    for came, expected in zip(*results, strict=True):
        np.testing.assert_allclose(came, expected, rtol=1e-4, atol=1e-5)


def check_a_penalty_leaves_rows_outside_the_batch_alone():
    ids = np.random.default_rng(3).permutation(ROWS)[:60].reshape(1, 20, 3)
    penalty = keras.regularizers.L2(0.03)
    layers = [stock(embeddings_regularizer=penalty), sok.Embedding(ROWS, DIM, weights=MATRIX)]
    layers.append(sok.Embedding(ROWS, DIM, weights=MATRIX, embeddings_regularizer=penalty))
    for layer in layers:
        model = classifier(layer)
        inner = keras.optimizers.SGD(0.1)
        model.compile(inner if layer is layers[0] else sok.DistributedOptimizer(inner), "mse")
        model.train_on_batch(ids[0], np.ones(20, "float32"))
    expected, free, found = (layer.get_weights()[0] for layer in layers)
    inside = np.unique(ids)
    np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-5, atol=1e-6)
    assert np.abs(found[inside] - free[inside]).max() > 1e-3
    outside = np.setdiff1d(np.arange(ROWS), inside)
    np.testing.assert_array_equal(found[outside], MATRIX[outside])


def check_a_penalty_covers_what_a_combiner_pools():
    penalty = keras.regularizers.L2(0.5)
    layer = sok.Embedding(ROWS, DIM, weights=MATRIX, combiner="mean", mask_zero=True, embeddings_regularizer=penalty)
    for ids in (tf.constant([[3, 0, 3], [7, 3, 0]]), tf.ragged.constant([[3, 3, 0], [7]])):
        layer(ids)
        np.testing.assert_allclose(sum(layer.losses), 0.5 * (MATRIX[[3, 7]] ** 2).sum(), rtol=1e-5)


@pytest.mark.parametrize("run_eagerly", [False, True])
def check_an_exact_penalty_shrinks_all_rows_as_keras_does(run_eagerly):
    rng = np.random.default_rng(4)
    ids = np.stack([rng.permutation(ROWS)[:60] for _ in range(4)])
    penalty = keras.regularizers.L2(0.03)
    ours = sok.Embedding(ROWS, DIM, weights=MATRIX, embeddings_regularizer=penalty, regularize="exact")
    _, expected = trained(stock(embeddings_regularizer=penalty), ids)
    _, found = trained(ours, ids, run_eagerly=run_eagerly)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    copy = type(ours).from_config(ours.get_config())
    assert copy.regularize == "exact" and copy.embedding_variable.row_terms.l2 == pytest.approx(0.03)


def check_an_exact_penalty_is_for_plain_sgd():
    layer = sok.Embedding(ROWS, DIM, embeddings_regularizer="l2", regularize="exact")
    with pytest.raises(ValueError, match=saying("regularize='exact'", "plain SGD", "Adagrad")):
        trained(layer, np.zeros([1, 20, 3], "int64"), optimizer="Adagrad")


def check_rows_of_an_exact_penalty_shrink_from_the_start():
    layers = []
    for make in (keras.layers.Embedding, sok.Embedding):
        options = {"regularize": "exact"} if make is sok.Embedding else {}
        layer = make(ROWS, DIM, "ones", embeddings_regularizer=keras.regularizers.L2(0.03), **options)
        layers.append(trained(layer, np.arange(60).reshape(1, 20, 3))[1])
    assert layers[0][199, 0] < 0.999
    np.testing.assert_allclose(layers[1], layers[0], rtol=1e-5)


CONSTRAINTS = {
    "non_neg": keras.constraints.NonNeg(),
    "unit_norm": keras.constraints.UnitNorm(axis=1),
    "max_norm": keras.constraints.MaxNorm(1.5, axis=-1),
}


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def check_a_constraint_acts_on_the_rows_that_a_step_has_changed(constraint):
    ids = np.stack([np.random.default_rng(5).permutation(ROWS)[:60] for _ in range(3)])
    ids[:, :5] = ids[:, 5:10]  # some come twice
    function = CONSTRAINTS[constraint]
    theirs = stock(embeddings_constraint=function) if IS_KERAS_3 else stock()
    # tf_keras refuses constraints where gradients are slices.
    constrain = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: theirs.set_weights([np.asarray(function(tf.constant(theirs.get_weights()[0])))])
    )
    _, expected = trained(theirs, ids[:1], callbacks=[] if IS_KERAS_3 else [constrain])
    _, found = trained(sok.Embedding(ROWS, DIM, weights=MATRIX, embeddings_constraint=function), ids[:1])
    inside, outside = np.unique(ids[0]), np.setdiff1d(np.arange(ROWS), ids[0])
    np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-5, atol=1e-6)
    assert np.abs(found[inside] - MATRIX[inside]).max() > 0.1
    np.testing.assert_array_equal(found[outside], MATRIX[outside])


def check_masks_are_those_of_keras():
    ids = tf.constant([[0, 3], [199, 0]])
    ours = sok.Embedding(ROWS, DIM, mask_zero=True)
    assert ours.compute_mask(ids).numpy().tolist() == stock(mask_zero=True).compute_mask(ids).numpy().tolist()
    assert sok.Embedding(ROWS, DIM).compute_mask(ids) is None
    assert sok.Embedding(ROWS, DIM, mask_zero=True, combiner="sum").compute_mask(ids) is None


LISTS = [[[3, 1], [0]], [[], [199, 0, 5]]]  # [B, F, None]
POOLED = {
    "ragged": (tf.ragged.constant(LISTS[0]), LISTS[0]),
    "ragged twice": (tf.ragged.constant(LISTS), LISTS),
    "sparse": (tf.SparseTensor([[0, 0], [0, 4], [2, 1]], [3, 0, 1], [3, 5]), [[3, 0], [], [1]]),
    "sparse cube": (tf.SparseTensor([[0, 0, 1], [1, 1, 0]], [3, 0], [2, 2, 5]), [[[3], []], [[], [0]]]),
    "dense": (tf.constant([[3, 0], [1, 1]]), [[3, 0], [1, 1]]),
    "cube": (tf.constant([[[3, 0], [1, 1]]]), [[[3, 0], [1, 1]]]),
    "ragged, even inside": (
        tf.RaggedTensor.from_row_splits(tf.constant([[3, 0], [1, 1]]), [0, 2]),
        [[[3, 0], [1, 1]]],
    ),
}


def pooled(ids, combiner, leaves_out_zero):
    """A vector for each innermost list."""
    if ids and isinstance(ids[0], list):
        return [pooled(part, combiner, leaves_out_zero) for part in ids]
    rows = MATRIX[[i for i in ids if i or not leaves_out_zero]] if ids else np.zeros([0, DIM])
    divisor = {"sum": 1, "mean": len(rows), "sqrtn": np.sqrt(len(rows))}[combiner]
    return (rows.sum(axis=0) / max(divisor, 1)).tolist()


@pytest.mark.parametrize("form", POOLED)
@pytest.mark.parametrize("kind", PLAIN)
def check_a_combiner_pools_the_last_axis(form, kind):
    ids, lists = POOLED[form]
    for combiner, mask_zero in ("sum", True), ("Mean", False), ("sqrtn", True):
        layer = sok.Embedding(ROWS, DIM, weights=MATRIX, combiner=combiner, mask_zero=mask_zero, **PLAIN[kind])
        came = as_lists(layer(ids))
        for of_sample, ids_of_sample in zip(came, lists, strict=True):
            np.testing.assert_allclose(of_sample, pooled(ids_of_sample, combiner.lower(), mask_zero), rtol=1e-5)


def check_shapes_are_known_before_anything_runs():
    ids = keras.Input((3, 5), dtype="int64")
    assert tuple(sok.Embedding(ROWS, DIM)(ids).shape) == (None, 3, 5, DIM)
    assert tuple(sok.Embedding(ROWS, DIM, combiner="mean")(ids).shape) == (None, 3, DIM)
    with pytest.raises(ValueError, match=saying("axis to combine")):
        sok.Embedding(ROWS, DIM, combiner="mean")(keras.Input((), dtype="int64"))


def check_any_ids_and_strings_have_rows():
    for input_dim in (None, -1):
        layer = sok.Embedding(input_dim, DIM, "ones")
        assert layer(tf.constant([[-5, 2**62]])).numpy().tolist() == [[[1.0] * DIM] * 2]
        layer(tf.constant([["to", "be"]]))
        layer([["or"]])
        words = sok.hash_strings(tf.constant(["to", "be", "or"])).numpy().tolist()
        assert sorted(layer.embedding_variable.export()[0].numpy()) == sorted([-5, 2**62, *words])
    # It never changes: tables live longer than programs.
    assert words[:2] == [3223756873574598834, 3681902991480312597]
    data = tf.data.Dataset.from_tensors(tf.ragged.constant([["to"], ["be", "or"]])).map(sok.hash_strings)
    assert next(iter(data)).to_list() == [words[:1], words[1:]]
    sparse = sok.hash_strings(tf.SparseTensor([[0, 1]], ["be"], [1, 2]))
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[0, words[1]]]
    with pytest.raises(TypeError, match=saying("strings", "int32")):
        sok.hash_strings([1])


def check_small_layers_are_ordinary_variables():
    small, large = sok.Embedding(64, DIM), sok.Embedding(65, DIM)
    for layer in (small, large):
        layer.build((None,))
    assert tuple(small.trainable_variables[0].shape) == (64, DIM) == small.get_weights()[0].shape
    assert large.trainable_variables[0] is large.embedding_variable
    assert sok.Embedding(3, DIM, sparse_as_dense_size=0).embedding_variable.num_keys == 3
    with pytest.raises(ValueError, match=saying("64 rows", "sparse_as_dense_size=0")):
        small.embedding_variable  # noqa: B018 (raises)
    with pytest.raises(tf.errors.InvalidArgumentError, match="64"):
        small(tf.constant([64]))


@pytest.mark.parametrize("kind", PLAIN)
def check_a_config_makes_an_equal_layer(kind):
    options = sok.TableOptions(seed=5, exchange_dtype="float16")
    layer = sok.Embedding(
        ROWS,
        DIM,
        keras.initializers.RandomNormal(seed=3),
        mask_zero=True,
        combiner="mean",
        table=options,
        **PLAIN[kind],
    )
    copy = type(layer).from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    if kind == "table":
        assert copy.embedding_variable.options == layer.embedding_variable.options
        assert copy.embedding_variable.options.seed == 5
    any_ids = sok.Embedding(None, DIM, capacity=10)
    assert type(any_ids).from_config(any_ids.get_config()).embedding_variable.capacity == 10


@pytest.mark.parametrize("kind", PLAIN)
def check_models_are_saved_and_loaded(kind, tmp_path):
    ids = np.arange(30).reshape(10, 3)
    model = classifier(sok.Embedding(ROWS, DIM, weights=MATRIX, **PLAIN[kind]))
    model.compile(sok.DistributedOptimizer("adam"), "mse")
    model.fit(ids, np.ones(10), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))
    assert "Embedding" in model.to_json()
    weights = model.get_weights()
    model.fit(ids, np.ones(10), verbose=0)
    model.set_weights(weights)
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))


def check_files_of_keras_own_layer_are_read(tmp_path):
    path = str(tmp_path / "stock.weights.h5")
    classifier(stock(name="same")).save_weights(path)
    layer = sok.Embedding(ROWS, DIM, name="same")
    if IS_KERAS_3:
        classifier(layer).load_weights(path)
        np.testing.assert_array_equal(layer.get_weights()[0], MATRIX)
    layer.set_weights([MATRIX[::-1]])
    np.testing.assert_array_equal(layer.get_weights()[0], MATRIX[::-1])
    with pytest.raises(ValueError, match=saying("(200, 4)", "(3, 4)")):
        layer.set_weights([MATRIX[:3]])


class Scaled(sok.Embedding):
    """A layer of the user's own."""

    def call(self, inputs):
        return 2 * super().call(inputs)


def check_subclasses_without_training_make_no_rows_in_evaluation():
    layer = Scaled(None, DIM, "ones")
    model = classifier(layer)
    model.compile(sok.DistributedOptimizer("sgd"), "mse")
    model.evaluate(np.ones([4, 3], int), np.ones(4), verbose=0)
    assert int(layer.embedding_variable.num_rows()) == 0
    assert layer(tf.constant([1])).numpy().tolist() == [[2.0] * DIM]
    assert int(layer.embedding_variable.num_rows()) == 1


REFUSED = {
    "lora_rank": ({"lora_rank": 4}, "`lora_rank`"),
    "a penalty of a matrix": ({"embeddings_regularizer": "orthogonal_regularizer"}, "no sum over rows"),
    "a constraint of columns": ({"embeddings_constraint": "max_norm"}, "MaxNorm(axis=1)"),
    "an exact penalty that is not l2": ({"embeddings_regularizer": "l1", "regularize": "exact"}, "L2 penalty alone"),
    "an exact penalty and a constraint": (
        {"embeddings_regularizer": "l2", "regularize": "exact", "embeddings_constraint": "non_neg"},
        "`embeddings_constraint`",
    ),
    "no such penalty": ({"embeddings_regularizer": "l2", "regularize": "all"}, "'batch' or 'exact'"),
    "float64": ({"dtype": "float64"}, "float64"),
    "two initializers": (
        {"embeddings_initializer": "ones", "table": sok.TableOptions(initializer="zeros")},
        "given twice",
    ),
    "hashed": ({"table": sok.TableOptions(hashed=False)}, "`hashed`"),
    "capacity": ({"capacity": 5}, "`capacity`"),
    "combiner": ({"combiner": "max"}, "'max'"),
    "trainable": ({"trainable": True, "table": sok.TableOptions(trainable=False)}, "`trainable`"),
    "no size": ({"input_dim": 0}, "`input_dim`"),
    "a scale without a size": ({"input_dim": None, "embeddings_initializer": "glorot_uniform"}, "`capacity=`"),
}


@pytest.mark.parametrize("case", REFUSED)
def check_what_a_table_cannot_have_is_refused_with_words(case):
    kwargs, word = REFUSED[case]
    with pytest.raises(ValueError, match=saying(word)):
        sok.Embedding(**{"input_dim": ROWS, "output_dim": DIM, **kwargs})


def check_wrong_ids_are_refused_with_words():
    with pytest.raises(ValueError, match=saying("float32", "dtype='int64'")):
        sok.Embedding(2**25, DIM)(tf.constant([1.0]))
    with pytest.raises(ValueError, match=saying("strings")):
        sok.Embedding(ROWS, DIM)(tf.constant(["a"]))
    with pytest.raises(ValueError, match=saying("mask_zero")):
        sok.Embedding(None, DIM, mask_zero=True)(tf.constant(["a"]))
    for ids in ([-1], [ROWS]):
        with pytest.raises(tf.errors.InvalidArgumentError, match=str(ids[0])):
            sok.Embedding(ROWS, DIM)(tf.constant(ids))
    layer = sok.Embedding(ROWS, DIM)
    layer.build(None)
    with pytest.raises(ValueError, match=saying("quantized", "export_saved_model")):
        layer.quantize("int8")
    with pytest.raises(ValueError, match=saying("`lora_rank`")):
        layer.enable_lora(4)
