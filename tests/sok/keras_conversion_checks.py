"""`sok.distributed_model` under `tf.keras`, judged by the model that it was: see keras_checks.py."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.keras.conversion import plan_of

keras = tf.keras
ROWS, DIM, BATCH, STEPS = 200, 3, 20, 3
FEATURES = ("user", "item", "shop")


class Scaled(keras.layers.Embedding):
    """Somebody's subclass, which has no call of its own."""

    def __init__(self, *args, unit="one", **kwargs):
        super().__init__(*args, **kwargs)
        self.unit = unit

    def get_config(self):
        return {**super().get_config(), "unit": self.unit}


class Doubled(keras.layers.Embedding):
    def call(self, inputs):
        return 2 * super().call(inputs)


def inputs():
    return [keras.Input((1,), dtype="int64", name=name) for name in FEATURES]


def functional():
    """With a layer that is called twice, a subclass, and a small layer."""
    user, item, shop = inputs()
    shared = keras.layers.Embedding(ROWS, DIM, name="shared")
    rows = [shared(user), shared(item), Scaled(ROWS, DIM, unit="two", name="scaled")(shop)]
    rows.append(keras.layers.Embedding(7, 2, name="small")(shop % 7))
    return keras.Model([user, item, shop], keras.layers.Dense(1)(keras.layers.Flatten()(join(rows))))


def nested():
    user, item, shop = inputs()
    ids = keras.Input((1,), dtype="int64")
    tower = keras.Model(ids, keras.layers.Embedding(ROWS, DIM, name="rows")(ids), name="tower")
    of_shop = keras.Sequential([keras.Input((1,), dtype="int64"), keras.layers.Embedding(ROWS, DIM)], name="of_shop")
    rows = join([tower(user), tower(item), of_shop(shop)])
    return keras.Model([user, item, shop], keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def join(rows):
    return keras.layers.Concatenate(axis=-1)(rows)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.towers = [[keras.layers.Embedding(ROWS, DIM, name="user")], [Scaled(ROWS, DIM, name="item")]]
        self.by_name = {"shop": keras.layers.Embedding(ROWS, DIM, name="shop")}
        self.join = keras.layers.Concatenate(axis=-1)
        self.dense = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        user, item, shop = inputs
        rows = self.join([self.towers[0][0](user), self.towers[1][0](item), self.by_name["shop"](shop)])
        self.add_loss(tf.reduce_sum(rows) * 1e-3)
        return self.dense(tf.squeeze(rows, 1))


KINDS = {"functional": functional, "nested": nested, "subclassed": Subclassed}


def samples(seed=0):
    """No id comes twice in a batch: Keras 3 squares gradients of equal ids one by one."""
    rng = np.random.default_rng(seed)
    ids = [np.concatenate([rng.permutation(100)[:BATCH] + 100 * f for _ in range(STEPS)]) for f in (0, 1, 0)]
    return [column[:, None] for column in ids], rng.normal(size=(BATCH * STEPS, 1)).astype("float32")


def twins(kind):
    """Two models of the same weights."""
    ids, _ = samples()
    models = KINDS[kind](), KINDS[kind]()
    for model in models:
        model([column[:2] for column in ids])
    models[1].set_weights(models[0].get_weights())
    return models


def train(model, optimizer=None):
    ids, labels = samples()
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model.fit(ids, labels, batch_size=BATCH, shuffle=False, verbose=0).history["loss"]


def predicted(model):
    return model.predict(samples(1)[0], batch_size=BATCH, verbose=0)


def names_of(model):
    return [layer.name for layer in model._flatten_layers()]


@pytest.mark.parametrize("kind", KINDS)
def check_a_converted_model_is_trained_as_the_model_that_it_was(kind):
    stock, model = twins(kind)
    names = names_of(model)
    assert sok.distributed_model(model, sparse_as_dense_size=10) is model
    assert names_of(model) == names and isinstance(model, type(stock))
    assert not any(
        type(layer) in (keras.layers.Embedding, Scaled) for layer in model._flatten_layers() if layer.name != "small"
    )
    np.testing.assert_array_equal(predicted(model), predicted(stock))
    losses = train(model, sok.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    np.testing.assert_allclose(losses, train(stock, keras.optimizers.SGD(0.1)), rtol=1e-5)
    np.testing.assert_allclose(predicted(model), predicted(stock), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def check_lookups_of_a_traced_model_become_one(kind):
    ids = [tf.constant(column) for column in samples()[0]]
    for one_exchange in (True, False):
        model = KINDS[kind]()
        model(ids)
        sok.distributed_model(model, sparse_as_dense_size=10, one_exchange=one_exchange)
        step = tf.function(lambda ids, model=model: model(ids, training=True))
        types = [op.type for op in step.get_concrete_function(ids).graph.get_operations()]
        found = [types.count(f"Sok>{name}") for name in ("GroupLookup", "TableLookup")]
        assert found == ([1, 0] if one_exchange else [0, 3])
        # A function fuses the dense part, which may round otherwise.
        np.testing.assert_allclose(step(ids), model(ids), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def check_a_compiled_model_goes_on_where_it_was(optimizer):
    stock, model = twins("functional")
    make = getattr(keras.optimizers, optimizer)
    assert train(model, make(0.05)) == train(stock, make(0.05))
    sok.distributed_model(model, sparse_as_dense_size=10)
    assert int(np.asarray(model.optimizer.iterations)) == STEPS
    np.testing.assert_allclose(train(model), train(stock), rtol=1e-4)
    np.testing.assert_allclose(predicted(model), predicted(stock), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def check_a_step_is_traced_once(name):
    """Optimizers and metrics make their variables in it, after which TensorFlow would trace it once more."""
    model, traced = sok.distributed_model(functional()), []
    model.compile(sok.DistributedOptimizer(name), "mse", metrics=["AUC", keras.metrics.MeanSquaredError()])
    step = model.train_step

    def train_step(data):
        traced.append(data)
        return step(data)

    model.train_step = train_step
    ids = [np.zeros([4, 1], np.int64)] * 3
    history = model.fit(ids, np.ones([4, 1], np.float32), batch_size=2, epochs=2, verbose=0).history
    assert len(traced) == 1 and len(history) == 3 and history["loss"][1] < history["loss"][0]
    assert len(model.optimizer.variables) > 1


def check_a_model_of_another_optimizer_is_to_be_compiled_anew():
    model = functional()
    model.compile(keras.optimizers.Adafactor(), "mse")
    with pytest.warns(UserWarning, match="No optimizer of embedding tables does what .*Adafactor"):
        sok.distributed_model(model)


def check_a_plan_is_printed_and_nothing_done(capsys):
    model = nested()
    sok.distributed_model(model, dry_run=True, keep="tower/rows")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["layer", "rows", "dim", "bytes", "where", "becomes"]
    by_path = {line[0]: " ".join(line[1:]) for line in lines[1:]}
    assert by_path["tower/rows"] == "200 3 2,400 each worker dense: `keep` names it"
    (path,) = (path for path in by_path if path.startswith("of_shop/"))
    assert by_path[path] == "200 3 2,400 row_wise(), 1 workers table"
    assert not any(isinstance(layer, sok.Embedding) for layer in model._flatten_layers())


def check_options_go_to_the_tables_that_they_name():
    model = nested()
    sok.distributed_model(model, table={"tower/rows": sok.TableOptions(exchange_dtype="float16")})
    found = {path: one.options.exchange_dtype for one in plan_of(model).layers for path in [one.path]}
    assert found.pop("tower/rows") == "float16" and set(found.values()) == {"float32"}


def check_what_cannot_be_converted_is_named_and_nothing_changes():
    user, item, shop = inputs()
    floats = keras.Input((1,))
    rows = [
        Doubled(ROWS, DIM, name="doubled")(user),
        keras.layers.Embedding(ROWS, DIM, embeddings_constraint="max_norm", name="regular")(item),
        keras.layers.Embedding(2**25, 1, name="of_floats", embeddings_initializer="zeros")(floats),
        keras.layers.Embedding(ROWS, DIM, name="fine")(shop),
    ]
    model = keras.Model([user, item, shop, floats], join(rows))
    with pytest.raises(ValueError, match="3 of 4 embedding layers") as error:
        sok.distributed_model(model)
    for text in (
        "doubled (Doubled): its class Doubled has a `call` of its own",
        "regular (Embedding): `embeddings_constraint` MaxNorm(max_value=2, axis=0) does not act on each row",
        "of_floats (Embedding): its ids are float32",
        "keep=['doubled', 'regular', 'of_floats']",
    ):
        assert text in str(error.value)
    assert type(model.get_layer("fine")) is keras.layers.Embedding
    sok.distributed_model(model, keep=["doubled", "regular", "of_floats"])
    assert isinstance(model.get_layer("fine"), sok.Embedding)


@pytest.mark.parametrize("regularize", ["batch", "exact"])
def check_regularizers_and_constraints_are_carried_over(regularize):
    ids = keras.Input((3,), dtype="int64")
    limits = {"embeddings_constraint": keras.constraints.NonNeg()} if regularize == "batch" else {}
    layer = keras.layers.Embedding(ROWS, DIM, embeddings_regularizer=keras.regularizers.L2(0.1), **limits)
    model = sok.distributed_model(keras.Model(ids, keras.layers.Flatten()(layer(ids))), regularize=regularize)
    terms = layer.embedding_variable.row_terms
    assert (terms.l2, terms.regularize, terms.constraint) == (
        pytest.approx(0.1),
        regularize,
        layer.embeddings_constraint,
    )
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    before = layer.get_weights()[0]
    loss = model.train_on_batch(np.array([[1, 2, 1]]), np.zeros([1, 3 * DIM], "float32"))
    rows = before[[1, 2, 1]]
    np.testing.assert_allclose(loss, 0.1 * (before[[1, 2]] ** 2).sum() + (rows**2).mean(), rtol=1e-4)


def check_arguments_are_judged():
    model = functional()
    with pytest.raises(ValueError, match="`keep` names 'nobody'"):
        sok.distributed_model(model, keep=["nobody"])
    with pytest.raises(ValueError, match="`table` names 'nobody'"):
        sok.distributed_model(model, table={"nobody": sok.TableOptions()})
    with pytest.raises(ValueError, match="`initializer` in `table`"):
        sok.distributed_model(model, table=sok.TableOptions(initializer="ones"))
    with pytest.raises(TypeError, match="must be a model of Keras"):
        sok.distributed_model(3)


def check_a_converted_model_is_saved_and_loaded(tmp_path):
    stock, model = twins("functional")
    stock.save_weights(tmp_path / "stock.weights.h5")
    sok.distributed_model(model, sparse_as_dense_size=10)
    train(model, sok.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.save(tmp_path / "model.keras")
    loaded = sok.distributed_model(keras.models.load_model(tmp_path / "model.keras"))
    np.testing.assert_array_equal(predicted(loaded), predicted(model))
    assert loaded.get_layer("scaled").unit == "two"
    of_stock = sok.distributed_model(functional(), sparse_as_dense_size=10)
    of_stock.load_weights(tmp_path / "stock.weights.h5")
    np.testing.assert_array_equal(predicted(of_stock), predicted(stock))


def check_lookups_that_cannot_be_moved_stay_where_they_are():
    a, b, c, d = (keras.layers.Embedding(ROWS, 1, name=f"stays_{name}") for name in "abcd")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.all = [a, b, c, d]

        def call(self, ids, training=False):
            first = a(ids)
            second = b(tf.cast(first[:, 0], tf.int64))  # of what another lookup gave
            third = c(tf.random.uniform(tf.shape(ids), maxval=ROWS, dtype=tf.int64))
            fourth = tf.cond(tf.reduce_sum(ids) > 0, lambda: d(ids), lambda: first)
            return first + second + third + fourth + a(ids + 1)

    model, ids = Model(), tf.constant([3, 4], tf.int64)
    for layer in (a, b, c, d):
        layer.build((None, 1))
        layer.set_weights([np.arange(ROWS, dtype="float32")[:, None]])
    c.set_weights([np.zeros([ROWS, 1], "float32")])
    sok.distributed_model(model)
    step = tf.function(lambda ids: model(ids))
    types = [op.type for op in step.get_concrete_function(ids).graph.get_operations()]
    assert types.count("Sok>GroupLookup") == 1 and types.count("Sok>TableLookup") == 2
    assert step(ids).numpy().ravel().tolist() == [13.0, 17.0]


def check_a_call_that_changes_is_refused():
    layers = [keras.layers.Embedding(ROWS, 1) for _ in range(3)]

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.all, self.calls = layers, 0

        def call(self, ids):
            self.calls += 1
            return sum(layer(ids) for layer in self.all[self.calls % 2 :])

    model = Model()
    sok.distributed_model(model)
    with pytest.raises(RuntimeError, match="one_exchange=False"):
        tf.function(lambda: model(tf.constant([[1]])))()
