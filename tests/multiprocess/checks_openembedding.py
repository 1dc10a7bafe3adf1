"""OpenEmbedding's scripts on several workers: its lines, and what its worker 0 does alone."""

import warnings

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.job import meeting
from sok.lookup.lookup import lookup_rows
from tests.multiprocess.checks_convert import BATCH, DIM, ROWS, deep_fm, fit, samples, trained_stock
from tests.multiprocess.training import by_rank_0, shared_folder
from tests.openembedding_files import Saved, adam_states, write


def check_the_lines_of_openembedding_train_as_stock_under_horovod(world):
    hvd = pytest.importorskip("horovod.tensorflow.keras")
    embed = pytest.importorskip("openembedding.tensorflow")
    model = deep_fm(keras, 2)
    sok.broadcast_variables(model.variables)
    weights = model.get_weights()
    optimizer = embed.distributed_optimizer(keras.optimizers.Adagrad(0.05))
    optimizer = hvd.DistributedOptimizer(optimizer) if world.size > 1 else optimizer
    model = embed.distributed_model(model)
    model.compile(optimizer, "mse")
    fit(world, model, 2)
    ids, labels = samples(2)
    adagrad = keras.optimizers.Adagrad(0.05)
    expected = by_rank_0(lambda: trained_stock(deep_fm(keras, 2), weights, adagrad, ids, labels, 2))
    np.testing.assert_allclose(model.predict(ids, batch_size=BATCH, verbose=0), expected, rtol=1e-4, atol=1e-5)


def model_of(library, name):
    ids = library.Input((1,), dtype="int64")
    rows = library.layers.Embedding(ROWS, DIM, name=name)(ids)
    dense = library.layers.Dense(1, name=f"{name}_dense")  # what others call theirs depends on what they have made
    return library.Model(ids, dense(library.layers.Flatten()(rows)))


def saved_by_rank_0(world, library, folder):
    """Worker 0 saves after each epoch, and after `fit`, where the others evaluate; what is read then."""
    embed = pytest.importorskip("openembedding.tensorflow")
    (ids, _), labels = samples(2)
    mine = slice(world.rank, None, world.size)
    model = embed.distributed_model(model_of(library, f"alone_{library.__name__}"))
    model.compile(embed.distributed_optimizer(library.optimizers.Adagrad(0.05)), "mse")
    found = []

    def save(epoch, logs):
        model.save_weights(str(folder / f"epoch{epoch}"))

    callbacks = [library.callbacks.LambdaCallback(on_epoch_end=save)] if world.rank == 0 else []
    callbacks = [sok.callbacks.MetricSumCallback(), *callbacks]
    for _ in range(2):
        model.fit(ids[mine], labels[mine], batch_size=BATCH // world.size, epochs=2, verbose=0, callbacks=callbacks)
        if world.rank == 0:
            model.save(str(folder / "model"))
            model.save_as_original_model(str(folder / "original"), include_optimizer=False)
            embed.save_server_model(model, str(folder / "rows"))
        found.append(model.predict(ids, batch_size=BATCH, verbose=0))
    served = tf.saved_model.load(str(folder / "original")).signatures["serving_default"]
    (of_served,) = served(tf.constant(ids)).values()
    np.testing.assert_allclose(of_served, found[-1], rtol=1e-5, atol=1e-6)
    layer = model.get_layer(f"alone_{library.__name__}")
    model.fit(ids[mine], labels[mine], batch_size=BATCH // world.size, verbose=0)
    for path in (folder / "model" / "variables" / "variables", folder / "epoch1"):
        layer.set_weights([np.zeros([ROWS, DIM], "float32")])
        model.load_weights(str(path))
        np.testing.assert_array_equal(model.predict(ids, batch_size=BATCH, verbose=0), found[-1])
    return embed, model, layer, ids[mine], labels[mine]


def check_rank_0_saves_alone_in_keras_3(world, tmp_path_of_rank):
    folder = shared_folder(tmp_path_of_rank)
    embed, model, layer, ids, labels = saved_by_rank_0(world, keras, folder)
    table, optimizer = layer.embedding_variable, model.optimizer.embedding_optimizer

    def accumulators():
        return np.asarray(table.slots(optimizer.slot_set)[1])

    embed.load_server_model(model, str(folder / "rows"))
    expected = accumulators()
    assert expected.size == 0 or expected.max() > 0.1  # of the squares of gradients
    model.fit(ids, labels, batch_size=BATCH // world.size, verbose=0)
    assert (accumulators() != expected).any()
    embed.load_server_model(model, str(folder / "rows"))
    np.testing.assert_array_equal(accumulators(), expected)
    embed.save_server_model(model, str(folder / "rows"), include_optimizer=False)
    embed.load_server_model(model, str(folder / "rows"))
    with pytest.raises(tf.errors.FailedPreconditionError, match="no optimizer has used"):
        accumulators()
    model.fit(ids, labels, batch_size=BATCH // world.size, verbose=0)
    assert accumulators().size


def check_rank_0_saves_alone_in_tf_keras(world, tmp_path_of_rank):
    saved_by_rank_0(world, tf_keras, shared_folder(tmp_path_of_rank))


def check_workers_that_meet_in_different_calls_are_told(world):
    if world.size == 1:
        return
    meeting.serve("test/nothing", lambda: None)
    with pytest.raises(RuntimeError, match="different calls: rank 0 in here, rank 1 in there"):
        meeting.together("here" if world.rank == 0 else "there", lambda: None)
    assert meeting.together("here", lambda: world.rank) == list(range(world.size))


def check_what_one_worker_asks_in_vain_is_raised_on_all(world, tmp_path_of_rank):
    embed = pytest.importorskip("openembedding.tensorflow")
    model = embed.distributed_model(model_of(keras, "in_vain"))
    missing = str(shared_folder(tmp_path_of_rank) / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        if world.rank == 0:
            embed.load_server_model(model, missing)
        else:
            model.predict(np.zeros([2, 1], "int64"), verbose=0)


def check_horovod_s_average_of_metrics_is_refused(world):
    hvd = pytest.importorskip("horovod.tensorflow.keras")
    embed = pytest.importorskip("openembedding.tensorflow")
    model = embed.distributed_model(model_of(keras, "average"))
    model.compile(embed.distributed_optimizer(keras.optimizers.SGD(0.05)), "mse")
    ids, labels = np.zeros([2, 1], "int64"), np.zeros([2, 1])
    with pytest.raises(ValueError, match="Horovod's MetricAverageCallback fails.*MetricSumCallback"):
        model.fit(ids, labels, callbacks=[hvd.callbacks.MetricAverageCallback()], verbose=0)
    model.fit(ids, labels, callbacks=[sok.callbacks.MetricAverageCallback()], verbose=0)


def check_what_horovod_averages_is_named_once(world):
    hvd = pytest.importorskip("horovod.tensorflow.keras")
    embed = pytest.importorskip("openembedding.tensorflow")

    def told(**op):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(embed.distributed_optimizer(keras.optimizers.SGD(0.05)), **op)
        return [str(one.message) for one in caught if "OpenEmbedding" in str(one.message)]

    embed._told.clear()
    assert told(op=hvd.Sum) == []
    if world.size > 1:
        (words,) = told()
        assert "averages" in words and "op=hvd.Sum" in words
    assert told() == []


KEYS = np.array([0, 1, 2, 7, 12, 2**40 + 1])


def check_its_checkpoint_becomes_the_rows_of_each_worker(world, tmp_path_of_rank):
    """Of three servers: rows and states where they belong, the step after that, and what is wrong on one worker."""
    folder = shared_folder(tmp_path_of_rank) / "of_servers"
    values = np.random.default_rng(3).uniform(0.1, 1.0, [6, 2, 7]).astype("float32")
    rows, m, v, array, accum, g, h = np.moveaxis(values, 2, 0)
    steps = np.arange(6)
    if world.rank == 0:
        any_key = Saved(KEYS, rows, optimizer="adam", states=adam_states(m, v, steps))
        write(folder / "adam", [any_key, Saved(steps, array, vocabulary=9, optimizer="adam")], 3, 3, 1)
        write(folder / "adagrad", [Saved(KEYS, rows, optimizer="adagrad", states=accum)], 4, 2, 2)
    sok.barrier()
    hashed = sok.EmbeddingVariable(dim=2, capacity=12, name="of_servers")
    identity = sok.EmbeddingVariable(dim=2, capacity=9, name="of_an_array", hashed=False, num_keys=9)
    optimizer = sok.optimizers.Adam(0.25, lazy=True, bias_correction="row")
    sok.load_openembedding(folder / "adam", [hashed, identity], optimizer)
    own = KEYS % world.size == world.rank
    keys, found = (array.numpy() for array in hashed.export())
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys[order], KEYS[own])
    np.testing.assert_array_equal(found[order], rows[own])
    expected = np.concatenate([m, v, steps[:, None]], 1)[own]
    np.testing.assert_array_equal(hashed.slots(optimizer.slot_set)[1].numpy()[order], expected.astype("float32"))
    np.testing.assert_array_equal(identity.sparse_read(steps), array)

    def step(table, gradients, optimizer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(table, tf.constant(KEYS)) * gradients)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step(hashed, g if world.rank == 0 else h, optimizer)
    total = g + (world.size - 1) * h
    powers = 0.9 ** (steps + 1)[:, None], 0.999 ** (steps + 1)[:, None]
    rate = 0.25 * np.sqrt(1 - powers[1]) / (1 - powers[0])
    new = rows - rate * (0.9 * m + 0.1 * total) / (np.sqrt(0.999 * v + 0.001 * total**2) + 1e-7)
    np.testing.assert_allclose(hashed.sparse_read(KEYS), new, rtol=2e-5, atol=1e-6)

    before = hashed.sparse_read(KEYS).numpy()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sok.load_openembedding(folder / ("nowhere" if world.rank == world.size - 1 else "adagrad"), hashed)
    if world.size > 1:
        with pytest.raises(ValueError, match="must be the same on all workers"):
            sok.load_openembedding(folder / "adam", [hashed, identity], optimizer, slots=world.rank == 0)
    np.testing.assert_array_equal(hashed.sparse_read(KEYS), before)

    for number, placement in enumerate((sok.row_wise(), sok.column_wise(2), sok.data_parallel(), sok.table_wise(0))):
        adagrad = sok.optimizers.Adagrad(0.25)
        table = sok.EmbeddingVariable(dim=2, capacity=12, name=f"of_servers_{number}", placement=placement)
        sok.load_openembedding(folder / "adagrad", table, adagrad)
        np.testing.assert_array_equal(table.sparse_read(KEYS), rows)
        step(table, g if world.rank == 0 else h, adagrad)
        new = rows - 0.25 * total / np.sqrt(accum + total**2)
        np.testing.assert_allclose(table.sparse_read(KEYS), new, rtol=2e-5, atol=1e-6)


def check_rank_0_loads_its_checkpoint_alone(world, tmp_path_of_rank):
    embed = pytest.importorskip("openembedding.tensorflow")
    folder = shared_folder(tmp_path_of_rank)
    ids, rows = np.arange(ROWS)[:, None], np.random.default_rng(1).normal(size=[ROWS, DIM]).astype("float32")
    model = embed.distributed_model(model_of(keras, "alone_of_servers"))
    model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.05)), "mse")
    stock = [weight for weight in model.weights if not isinstance(weight, sok.EmbeddingVariable)]
    if world.rank == 0:
        path = folder / "of_servers_alone.h5"
        inside = f"{path}.openembedding/openembedding"
        write(inside, [Saved(ids[:, 0], rows, vocabulary=ROWS, optimizer="adagrad", states=rows**2)], 2)
        with h5py.File(path, "w") as file:  # as Keras 2 writes weights
            group = file.create_group("dense")
            for weight in stock:
                group[f"{weight.path}:0"] = np.full(weight.shape, 0.5)
            group.attrs["weight_names"] = [f"{weight.path}:0" for weight in stock]
        embed.load_server_model(model, inside)
        model.load_weights(str(path))
    model.predict(ids, verbose=0)
    assert len(stock) == 2 and all((weight.numpy() == 0.5).all() for weight in stock)
    layer = model.get_layer("alone_of_servers")
    np.testing.assert_array_equal(layer(tf.constant(ids))[:, 0], rows)
    keys, accumulators, _ = layer.embedding_variable.slots(model.optimizer.embedding_optimizer.slot_set)
    np.testing.assert_array_equal(accumulators, rows[keys] ** 2)
