"""Two runs in one process, as in a notebook or a sweep; two models of one name; two optimizers of one table."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.layers import for_keras
from sok.lookup.lookup import lookup_rows

IDS = np.array([[1, 2], [3, 4], [1, 4], [5, 6]] * 4)
LABELS = (IDS.sum(axis=1, keepdims=True) % 2).astype("float32")
OPTIMIZERS = {
    "distributed Adam": lambda k: sok.DistributedOptimizer(k.optimizers.Adam(0.05)),
    "own rule for tables": lambda k: sok.DistributedOptimizer(k.optimizers.SGD(0.05), sok.optimizers.Adagrad(0.05)),
}


@pytest.fixture(autouse=True)
def no_job():
    sok.shutdown()
    yield
    sok.shutdown()


def model_of(k, optimizer="distributed Adam", name="ads"):
    ids = k.Input((2,), dtype="int64")
    rows = for_keras(k).DistributedEmbedding("sum", 100, 4, slot_num=2, max_nnz=1, name=name)(ids)
    out = k.layers.Dense(1, kernel_initializer=k.initializers.GlorotUniform(seed=1))(k.layers.Flatten()(rows))
    model = k.Model(ids, out)
    model.compile(OPTIMIZERS[optimizer](k), "mse")
    return model


def fit(model, epochs=1):
    return model.fit(IDS, LABELS, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def table_of(model):
    return next(layer.embedding_variable for layer in model.layers if hasattr(layer, "embedding_variable"))


def rows_of(table):
    return table.sparse_read(np.arange(8)).numpy()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("k", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_second_run_does_what_the_first_did(k, optimizer):
    runs = []
    for _ in range(2):
        sok.Init(global_batch_size=8, seed=3)
        model = model_of(k, optimizer)
        losses = fit(model, 2)
        runs.append((model, table_of(model), losses, rows_of(table_of(model))))  # what the first had is still there
        sok.shutdown()
    (_, first, losses, rows), (_, second, losses_again, rows_again) = runs
    assert first.table_name == second.table_name == "ads" and first is not second
    assert losses == losses_again
    np.testing.assert_array_equal(rows, rows_again)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("seed", [3, 4], ids=["the same seed", "another seed"])
def test_a_second_run_goes_on_from_the_checkpoint_of_the_first(tmp_path, optimizer, seed):
    sok.Init(seed=3)
    model = model_of(keras, optimizer)
    fit(model, 2)
    sok.save(tmp_path, model)
    weights = model.layers[-1].get_weights()
    dense = [variable.numpy().copy() for variable in model.optimizer.inner.variables]
    expected = fit(model)
    sok.shutdown()

    sok.Init(seed=seed)
    model = model_of(keras, optimizer)
    model.optimizer.build(model.trainable_variables)
    if seed == 3:
        sok.restore(tmp_path, model)
    else:
        with pytest.warns(UserWarning, match="another seed"):
            sok.restore(tmp_path, model)
    model.layers[-1].set_weights(weights)
    for variable, value in zip(model.optimizer.inner.variables, dense, strict=True):
        variable.assign(value)
    np.testing.assert_allclose(fit(model), expected, rtol=1e-6)


def test_two_models_of_one_name_keep_apart_and_come_back(tmp_path):
    def two():
        models = [model_of(keras, name=name) for name in ("ads", "ads_")]
        again = model_of(keras, name="ads")  # Keras lets two models have layers of one name
        return [*models, again]

    sok.Init(seed=3)
    models = two()
    for epochs, model in enumerate(models, 1):
        fit(model, epochs)
    tables = [table_of(model) for model in models]
    names = [table.table_name for table in tables]
    assert len(set(names)) == 3
    sok.save(tmp_path, tables, [model.optimizer for model in models])
    rows = [rows_of(table) for table in tables]
    assert not np.array_equal(rows[0], rows[2])
    sok.shutdown()

    sok.Init(seed=3)
    fresh = [table_of(model) for model in two()]
    assert [table.table_name for table in fresh] == names
    sok.restore(tmp_path, fresh)
    for table, expected in zip(fresh, rows, strict=True):
        np.testing.assert_array_equal(rows_of(table), expected)


def step(table, optimizer, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(lookup_rows(table, tf.constant(keys, tf.int64)) - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as they were", "the other way round"])
@pytest.mark.parametrize("rules", [("Adam", "Adagrad"), ("Adam", "Adam"), ("LazyAdam", "Adam")], ids=str)
def test_two_optimizers_of_a_table_go_on_after_a_restore(tmp_path, rules, order):
    """Whichever of the fresh ones is made, or used, first."""

    def make(which):
        optimizers = {i: getattr(sok.optimizers, rules[i])(0.05, name=f"of_phase_{i}") for i in which}
        return [optimizers[i] for i in (0, 1)]

    table, optimizers = sok.EmbeddingVariable(2, 50, name="shared", seed=5), make((0, 1))
    for keys in ([1, 2], [2, 3, 3]):
        step(table, optimizers[0], keys)
    step(table, optimizers[1], [2, 4])
    sok.save(tmp_path, table, optimizers)
    for i in order:
        step(table, optimizers[i], [1, 4, 5])
    expected = rows_of(table)
    sok.shutdown()

    fresh_table, fresh = sok.EmbeddingVariable(2, 50, name="shared", seed=5), make(order)
    sok.restore(tmp_path, fresh_table, fresh)
    assert [int(optimizer.iterations) for optimizer in fresh] == [2, 1]
    for i in order:
        step(fresh_table, fresh[i], [1, 4, 5])
    np.testing.assert_allclose(rows_of(fresh_table), expected, rtol=1e-5, atol=1e-7)
