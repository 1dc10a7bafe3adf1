"""The layers under `tf.keras`, whichever Keras that is: run by test_keras3.py here, by test_tf_keras.py in a process of
its own with TF_USE_LEGACY_KERAS=1. Functions named check_* are the questions, here and in keras_*_checks.py.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.table import as_variable
from sok.table.weights import TableRows
from tests.messages import saying

keras = tf.keras
IS_KERAS_3 = not keras.layers.Layer.__module__.startswith("tf_keras")
IDS = np.array([[1, 2], [3, 4], [1, 4], [5, 6]] * 4)
LABELS = (IDS.sum(axis=1, keepdims=True) % 2).astype("float32")


def checks_as_tests(*modules):
    """The checks of the modules, under the names that pytest collects."""
    checks = {name: value for module in modules for name, value in vars(module).items() if name.startswith("check_")}
    return {"test_" + name.removeprefix("check_"): check for name, check in checks.items()}


def embedding(name="e", **kwargs):
    options = dict(combiner="sum", max_vocabulary_size_per_gpu=100, embedding_vec_size=4, slot_num=2, max_nnz=3)
    return sok.DistributedEmbedding(**{**options, **kwargs}, name=name)


def head():
    return [
        keras.layers.Flatten(),
        keras.layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1)),
        keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)),
    ]


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.embedding = layer
        self.head = head()

    def call(self, ids, training=None):  # Keras 3 says whether it trains only to models that ask
        x = self.embedding(ids)
        for layer in self.head:
            x = layer(x)
        return x


def functional(layer):
    ids = keras.Input((2,), dtype="int64")
    x = layer(ids)
    for part in head():
        x = part(x)
    return keras.Model(ids, x)


STYLES = {
    "functional": functional,
    "sequential": lambda layer: keras.Sequential([keras.Input((2,), dtype="int64"), layer, *head()]),
    "subclassed": Subclassed,
}


def compiled(style, layer, learning_rate=0.05, **kwargs):
    model = STYLES[style](layer)
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(learning_rate)), "mse", **kwargs)
    return model


class DenseTwin(keras.layers.Layer):
    """The same lookup in an ordinary variable of ten rows."""

    def __init__(self, rows):
        super().__init__()
        self._rows = rows

    def build(self, shape):
        rows = self._rows
        self.table = self.add_weight(shape=rows.shape, initializer=lambda *_, **__: tf.constant(rows), name="table")

    def call(self, ids):
        # A product, not a gather: Keras 3's Adam squares the gradients of equal ids one by one before it adds them.
        return tf.tensordot(tf.one_hot(ids, len(self._rows)), tf.convert_to_tensor(self.table), axes=1)


@pytest.mark.parametrize("style", STYLES)
def check_fit_trains_as_a_stock_model_on_a_dense_table(style):
    layer = embedding()
    rows = layer.var.sparse_read(np.arange(10)).numpy()
    stock = STYLES[style](DenseTwin(rows))
    stock.compile(keras.optimizers.Adam(0.05), "mse")
    model = compiled(style, layer)
    options = dict(batch_size=4, epochs=3, shuffle=False, verbose=0)
    losses, expected = (m.fit(IDS, LABELS, **options).history["loss"] for m in (model, stock))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)  # of 12 steps of Adam, each from where the last one ended
    assert losses[-1] < losses[0]
    assert sorted(layer.var.export()[0].numpy().tolist()) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(model.predict(IDS, verbose=0), stock.predict(IDS, verbose=0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("style", STYLES)
def check_only_training_inserts(style):
    layer = embedding()
    model = compiled(style, layer)
    model.predict(IDS, verbose=0)
    model.evaluate(IDS, LABELS, verbose=0)
    assert int(layer.var.size()) == 0
    model.fit(IDS[:1], LABELS[:1], verbose=0)
    assert int(layer.var.size()) == 2
    model(tf.constant([[20, 21]], tf.int64), training=False)
    assert int(layer.var.size()) == 2
    model(tf.constant([[30, 31]], tf.int64), training=True)
    assert int(layer.var.size()) == 4


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
def check_evaluate_and_predict_do_not_insert_though_the_model_does_not_ask(options):
    class Untold(Subclassed):
        def call(self, ids):
            return super().call(ids)

    layer = embedding()
    model = Untold(layer)
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse", **options)
    model.predict(IDS, verbose=0)
    model.evaluate(IDS, LABELS, verbose=0)
    assert int(layer.var.size()) == 0
    model.fit(IDS[:1], LABELS[:1], validation_data=(IDS, LABELS), verbose=0)
    model.predict_on_batch(IDS)
    model.test_on_batch(IDS, LABELS)
    assert int(layer.var.size()) == 2


def check_a_bare_layer_inserts_and_does_not_turn_others_to_training():
    layer = embedding()
    layer(tf.constant([[1, 2]], tf.int64))
    assert int(layer.var.size()) == 2
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dropout(0.9)(layer(ids)))
    assert not np.any(model(tf.constant([[3, 4]], tf.int64)).numpy() == 0)  # dropout stays off in a bare call


def check_the_fixed_layer_trains():
    layer = sok.All2AllDenseEmbedding(100, 4, slot_num=2, nnz_per_slot=1, name="fixed")
    model = compiled("sequential", layer)
    losses = model.fit(IDS, LABELS, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert layer.output.shape[1:] == (2, 1, 4) if IS_KERAS_3 else True


TABLES = {
    "EmbeddingVariable": lambda: sok.EmbeddingVariable(4, 100, initializer="ones"),
    "Variable": lambda: sok.Variable(np.ones((100, 4), np.float32)),
    "DynamicVariable": lambda: sok.DynamicVariable(dimension=4, initializer="ones"),
}


class Own(keras.layers.Layer):
    """A layer of the user's own that keeps a table in an attribute, a list or a dict."""

    def __init__(self, table, place):
        super().__init__()
        self.kept = {"attribute": table, "list": [table], "dict": {"a": table}}[place]
        self.place = place

    def call(self, ids):
        table = {"attribute": lambda: self.kept, "list": lambda: self.kept[0], "dict": lambda: self.kept["a"]}
        return sok.group_embedding_lookup_sparse([table[self.place]()], [tf.sparse.from_dense(ids)], "sum")[0]


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("place", ["attribute", "list", "dict"])
def check_tables_of_layers_of_ones_own_are_trained(kind, place, tmp_path):
    table = TABLES[kind]()
    layer = Own(table, place)
    ids = keras.Input((2,), dtype="int64")
    dense = keras.layers.Dense(1)
    model = keras.Model(ids, dense(layer(ids))) if place == "attribute" else keras.Sequential([ids, layer, dense])
    assert any(v is table for v in model.trainable_variables) and len(model.trainable_variables) == 3
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(IDS, LABELS, verbose=0, epochs=2)
    rows = table.sparse_read(np.arange(1, 7)).numpy()
    assert (rows != 1).all(), "rows that were looked up have not been trained"
    weights = model.get_weights()
    model.fit(IDS, LABELS, verbose=0)
    model.set_weights(weights)
    np.testing.assert_array_equal(table.sparse_read(np.arange(1, 7)), rows)
    sok.save(str(tmp_path / "saved"), model)
    model.fit(IDS, LABELS, verbose=0)
    sok.restore(str(tmp_path / "saved"), model)
    np.testing.assert_array_equal(table.sparse_read(np.arange(1, 7)), rows)


class Hidden:
    """What no Keras looks into."""

    def __init__(self, content):
        self.content = content


class Forgetful(keras.Model):
    """Keeps its layer where Keras does not find it."""

    def __init__(self, layer):
        super().__init__()
        self.hidden = Hidden(layer)
        self.head = head()

    call = Subclassed.call

    @property
    def embedding(self):
        return self.hidden.content


def check_tables_that_fit_does_not_find_are_named():
    layer = embedding("forgotten")
    model = Forgetful(layer)
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.warns(UserWarning, match=saying("'forgotten'", model.name, "attribute", "trainable=False")) as told:
        model.fit(IDS, LABELS, verbose=0, epochs=2)
    assert sum("forgotten" in str(w.message) for w in told) == 1
    assert not any(v is layer.var for v in model.trainable_variables) and int(layer.var.step) == 0


@pytest.mark.filterwarnings("error:Embedding table")
def check_tables_that_are_not_to_be_trained_are_not_named():
    layer = embedding(trainable=False)
    for model in (Forgetful(layer), compiled("subclassed", layer)):
        model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.fit(IDS, LABELS, verbose=0)
    layer = embedding()
    model = Forgetful(layer)
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.evaluate(IDS, LABELS, verbose=0)
    model.predict(IDS, verbose=0)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def check_sparse_and_ragged_inputs(kind):
    layer = embedding(combiner="mean")
    ids = keras.Input((2, 3 if kind == "sparse" else None), dtype="int64", **{kind: True})
    out = layer(ids)
    assert tuple(out.shape) == (None, 2, 4)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(out)))
    ragged = tf.ragged.constant([[[1], [2, 3]], [[], [4]], [[5], []], [[6, 6, 6], [1]]], dtype=tf.int64)
    given = ragged.to_sparse() if kind == "sparse" else ragged
    given = tf.sparse.reset_shape(given, [4, 2, 3]) if kind == "sparse" else given
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    data = tf.data.Dataset.from_tensor_slices((given, np.ones([4, 1], "float32"))).batch(2)
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert int(layer.var.size()) == 6
    assert model.predict(data, verbose=0).shape == (4, 1)


def check_one_layer_used_twice_in_a_model():
    layer = embedding()
    a, b = keras.Input((2,), dtype="int64"), keras.Input((2,), dtype="int64")
    x = keras.layers.Concatenate()([keras.layers.Flatten()(layer(a)), keras.layers.Flatten()(layer(b))])
    model = keras.Model([a, b], keras.layers.Dense(1)(x))
    assert sum(v is layer.var for v in model.trainable_variables) == 1
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    losses = model.fit([IDS, IDS[:, ::-1]], LABELS, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def check_several_layers_are_several_tables():
    layers = [embedding(name=n) for n in ("wide", "deep")]
    ids = keras.Input((2,), dtype="int64")
    x = keras.layers.Concatenate()([keras.layers.Flatten()(layer(ids)) for layer in layers])
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    embeddings, others = sok.split_embedding_variable_from_others(model.trainable_variables)
    assert [e is layer.var for e, layer in zip(embeddings, layers, strict=True)] == [True, True]
    assert len(others) == 2


def check_summary_and_parameter_counts():
    layer = embedding()
    model = functional(layer)
    dense = 8 * 8 + 8 + 8 + 1
    for rows in (0, 3):  # those in use: what there may be, nobody has in memory
        assert (layer.count_params(), model.count_params()) == (rows * 4, dense + rows * 4)
        model.summary(print_fn=lambda line, into=(lines := []), **_: into.append(line))
        text = "\n".join(lines)
        assert "(None, 2, 4)" in text and f"Total params: {dense + rows * 4} " in text
        layer(tf.constant([[1, 2], [3, 1]]))
    assert layer.var.shape == (0, 4)
    own = Own(sok.Variable(np.ones([10, 4], np.float32)), "attribute")
    own(tf.constant([[1, 2]]))
    assert own.count_params() == 40


def check_plain_lists_are_inputs():
    layer = embedding(embedding_initializer="ones")
    fixed = sok.All2AllDenseEmbedding(100, 4, slot_num=2, nnz_per_slot=1)
    ids = [[1, 2], [3, 4]]
    for out in (layer(ids), layer(inputs=ids), layer(tuple(ids), weights=[[1.0, 1.0], [1.0, 1.0]])):
        assert out.shape == (2, 2, 4)
    for out in (fixed(ids), fixed(inputs=ids), fixed([[[1], [2]], [[3], [4]]])):
        assert out.shape == (2, 2, 1, 4)
    assert (sorted(layer.var.export()[0].numpy()), layer.var.key_dtype) == ([1, 2, 3, 4], tf.int64)


@pytest.mark.parametrize("kind", ["layer", "Variable"])
def check_tensorboard_draws_rows(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(as_variable, "_MAX_DRAWN", 4)
    layer = embedding() if kind == "layer" else Own(TABLES[kind](), "attribute")
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1, name="d")(keras.layers.Flatten()(layer(ids))))
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    board = keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1, write_images=True, write_graph=False)
    model.fit(IDS, LABELS, verbose=0, callbacks=[board])
    (table,) = layer.trainable_variables
    name = table.table_name
    num_rows = int(table.size())
    assert num_rows == (6 if kind == "layer" else 100), "drawing makes no rows"
    events = tf.data.TFRecordDataset([str(path) for path in tmp_path.glob("train/*")])
    values = [v for e in events for v in tf.compat.v1.Event.FromString(e.numpy()).summary.value]
    drawn = {v.tag: tf.make_ndarray(v.tensor) for v in values}
    (rows,) = [bins for tag, bins in drawn.items() if tag in (f"{name}/histogram", f"{name}_0/histogram")]
    # Bins are [left, right, number of values].
    sample = table.sparse_read(table.export()[0][:: num_rows // 3 if kind == "layer" else num_rows // 4]).numpy()
    assert rows[:, 2].sum() == sample.size
    np.testing.assert_allclose([rows[0, 0], rows[-1, 1]], [sample.min(), sample.max()], rtol=1e-6)
    assert sum("histogram" in tag for tag in drawn) == 3, "of dense weights, too"


def check_frozen_layers_stay_as_they_are():
    layer = embedding()
    model = compiled("functional", layer)
    model.fit(IDS, LABELS, verbose=0)
    layer.trainable = False
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    before = layer.var.sparse_read(np.arange(10)).numpy()
    assert not any(v is layer.var for v in model.trainable_variables)
    model.fit(IDS, LABELS, verbose=0)
    np.testing.assert_array_equal(layer.var.sparse_read(np.arange(10)), before)
    layer.trainable = True
    assert any(v is layer.var for v in model.trainable_variables)


def rows_of(layer):
    """The table as a dictionary."""
    keys, rows = layer.var.export()
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))


def check_weights_that_were_got_can_be_set_again():
    layer = embedding()
    model = compiled("functional", layer)
    model.fit(IDS, LABELS, verbose=0)
    weights, rows, predicted = model.get_weights(), rows_of(layer), model.predict(IDS, verbose=0)
    assert [w.shape for w in weights] == [w.shape for w in model.weights]
    table = next(w for w in weights if isinstance(w, TableRows))
    assert repr(table) == "TableRows(6 rows of 4)"
    for kept in (weights, copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        model.fit(IDS + 3, LABELS, verbose=0)  # other rows, and others of the same keys
        assert rows_of(layer) != rows and int(layer.var.size()) == 9
        model.set_weights(kept)
        assert rows_of(layer) == rows
        np.testing.assert_array_equal(model.predict(IDS, verbose=0), predicted)
    clone = keras.models.clone_model(model)
    clone.set_weights(weights)
    assert rows_of(clone.layers[1]) == rows and clone.layers[1].var is not layer.var
    np.testing.assert_allclose(clone.predict(IDS, verbose=0), predicted, rtol=1e-6)


def check_weights_that_were_calculated_with_leave_rows_and_say_so():
    layer = embedding()
    model = compiled("functional", layer)
    model.fit(IDS, LABELS, verbose=0)
    rows = rows_of(layer)
    averaged = [0.5 * w for w in model.get_weights()]
    with pytest.warns(UserWarning, match="The rows of embedding table .* are not saved here"):
        model.set_weights(averaged)
    assert rows_of(layer) == rows
    np.testing.assert_array_equal(model.layers[-1].get_weights()[0], averaged[-2])


def check_early_stopping_brings_the_best_rows_back():
    layer = embedding()
    model = compiled("functional", layer)
    at_end_of_epoch = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: at_end_of_epoch.append(rows_of(layer)))
    # The first epoch is the best there is if losses that fall are bad.
    stop = keras.callbacks.EarlyStopping("loss", mode="max", patience=2, restore_best_weights=True)
    history = model.fit(IDS, LABELS, epochs=9, verbose=0, callbacks=[note, stop]).history
    assert len(history["loss"]) == 3
    assert rows_of(layer) == at_end_of_epoch[0] != at_end_of_epoch[-1]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad"])
def check_a_stock_optimizer_alone_says_what_to_use(optimizer):
    model = functional(embedding())
    model.compile(getattr(keras.optimizers, optimizer)(0.1), "mse")
    with pytest.raises((TypeError, ValueError, tf.errors.OpError)) as error:
        model.fit(IDS, LABELS, verbose=0)
    assert "sok.DistributedOptimizer" in str(error.value)


def check_mixed_precision():
    layer = embedding(dtype="mixed_bfloat16" if IS_KERAS_3 else keras.mixed_precision.Policy("mixed_bfloat16"))
    model = functional(layer)
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    losses = model.fit(IDS, LABELS, epochs=3, verbose=0).history["loss"]
    assert layer(tf.constant(IDS)).dtype == tf.bfloat16
    assert layer.var.dtype == tf.float32
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "function"])
@pytest.mark.parametrize("inner", ["sok.optimizers", "stock"])
def check_scaled_losses_as_scripts_for_sok_v1_train_them(inner, run):
    ids, rates = tf.constant(IDS), tf.constant([[[1.0], [3.0]]])
    layers = [embedding(embedding_initializer="ones") for _ in range(2)]
    make = (lambda: sok.optimizers.Adam(0.1)) if inner == "sok.optimizers" else lambda: keras.optimizers.Adam(0.1)
    scaler = sok.tf.keras.mixed_precision.LossScaleOptimizer(make(), initial_scale=2.0**7)
    table, twin = (layer.embedding_variable for layer in layers)
    plain = sok.optimizers.Adam(0.1, epsilon=make().epsilon)

    @run
    def step(factor):
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_sum(layer(ids) * rates) * factor for layer in layers]
            scaled = scaler.scale_loss(losses[0]) if IS_KERAS_3 else scaler.get_scaled_loss(losses[0])
        grads = [tape.gradient(scaled, table)]
        if not IS_KERAS_3:
            grads = scaler.get_unscaled_gradients(grads)
        with sok.OptimizerScope([table]):
            scaler.apply_gradients(zip(grads, [table], strict=True))
        plain.apply_gradients([(tape.gradient(losses[1], twin), twin)])

    if IS_KERAS_3:  # until it is built, the scale is a constant of the function
        with sok.OptimizerScope([table]):
            scaler.build([table])
    for _ in range(3):
        step(tf.constant(1.0))
    rows = table.export()[1].numpy()
    np.testing.assert_allclose(rows, twin.export()[1], rtol=1e-6)
    assert not np.allclose(rows, 1.0)
    step(tf.constant(np.inf))
    np.testing.assert_array_equal(table.export()[1], rows)  # it was left out
    assert float(scaler.dynamic_scale if IS_KERAS_3 else scaler.loss_scale) == 2.0**6


def check_run_eagerly_and_several_steps_per_execution():
    for options in (dict(run_eagerly=True), dict(steps_per_execution=2)):
        layer = embedding()
        losses = compiled("functional", layer, **options).fit(IDS, LABELS, batch_size=4, epochs=3, verbose=0).history
        assert losses["loss"][-1] < losses["loss"][0]
        assert int(layer.var.size()) == 6


def check_in_a_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        layer, ids = embedding(), tf.compat.v1.placeholder(tf.int64, [None, 2])
        out = layer(ids, training=True)
        gradient = tf.gradients(tf.reduce_sum(out), tf.compat.v1.trainable_variables())
        assert tf.compat.v1.trainable_variables() == [layer.var]
        session.run(tf.compat.v1.global_variables_initializer())
        rows, slices = session.run([out, gradient[0]], {ids: [[7, 8], [7, 7]]})
        assert rows.shape == (2, 2, 4) and rows.dtype == np.float32
        assert sorted(slices.indices.tolist()) == [0, 1]
