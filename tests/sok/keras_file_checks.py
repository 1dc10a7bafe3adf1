"""What files of Keras hold of a model with tables, whichever Keras `tf.keras` is: run as keras_checks.py is."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.sok.keras_checks import IDS, IS_KERAS_3, LABELS, compiled, embedding, functional, rows_of

keras = tf.keras


@pytest.mark.parametrize("file", ["m.weights.h5", "m.keras"])
def check_files_hold_rows_and_configuration(file, tmp_path):
    layer = embedding(embedding_initializer=keras.initializers.RandomNormal(0.0, 0.5, seed=3), key_dtype="int32")
    ids = keras.Input((2,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(IDS.astype("int32"), LABELS, verbose=0)
    path = str(tmp_path / file)
    save = model.save_weights if file.endswith("h5") else model.save
    if not IS_KERAS_3 and not file.endswith("h5"):
        # An optimizer of ours is no part of this check: see the optimizers' own.
        model = keras.Model(model.input, model.output)
        save = model.save
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* rows .* of embedding table")
        save(path)
    weights = [w.numpy() for w in model.layers[-1].weights]
    rows = rows_of(layer)
    if file.endswith("h5"):
        for w in model.layers[-1].weights:
            w.assign(tf.zeros_like(w))
        layer.var.assign([1, 77], np.zeros([2, 4]))
        model.load_weights(path)
        loaded = model
    else:
        loaded = keras.models.load_model(path, compile=False)
        again = loaded.layers[1]
        assert type(again) is type(layer)
        assert again.get_config() == layer.get_config()
        assert (again.var.key_dtype, again.var.seed) == (tf.int32, layer.var.seed)
    assert rows_of(loaded.layers[1]) == rows != {}
    for w, expected in zip(loaded.layers[-1].weights, weights, strict=True):
        np.testing.assert_array_equal(w.numpy(), expected)


def saved_model(name):
    """Models of one name are alike, whichever tables the process has made before."""
    initializer = keras.initializers.RandomNormal(0.0, 0.5, seed=3)
    return compiled("functional", embedding(name, embedding_initializer=initializer))


def losses_of(model, epochs, *callbacks):
    history = model.fit(IDS, LABELS, 4, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return history.history["loss"]


@pytest.mark.filterwarnings("error:.* rows .* of embedding table")
@pytest.mark.parametrize("way", ["save_weights", "sok.save_weights", "ModelCheckpoint", "TensorFlow's format"])
def check_training_goes_on_from_a_file(way, tmp_path):
    path = str(tmp_path / "m.weights.h5")
    if way == "TensorFlow's format":
        if IS_KERAS_3:
            return  # which has it no more
        path = str(tmp_path / "weights")
    model, other = saved_model("file"), saved_model("file")
    if way == "ModelCheckpoint":
        losses_of(model, 3, keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
    else:
        losses_of(model, 3)
        model.save_weights(path)
    if way == "sok.save_weights":
        sok.save_weights(model, path)
        sok.load_weights(other, path)
    else:
        other.optimizer.build(other.trainable_variables)  # Keras loads its variables only if there are some
        other.load_weights(path)
    assert rows_of(other.layers[1]) == rows_of(model.layers[1])
    np.testing.assert_allclose(losses_of(other, 10), losses_of(model, 10), rtol=1e-5)


@pytest.mark.filterwarnings("error:.* rows .* of embedding table")
def check_backups_bring_interrupted_training_back(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 3:
                raise KeyboardInterrupt

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path))

    with pytest.raises(KeyboardInterrupt):
        losses_of(saved_model("backup"), 13, Interrupt(), backup())
    again = losses_of(saved_model("backup"), 13, backup())
    assert len(again) == 10
    np.testing.assert_allclose(again, losses_of(saved_model("backup"), 13)[3:], rtol=1e-5)


def check_whole_models_train_on(tmp_path):
    if not IS_KERAS_3:
        return  # tf_keras cannot write down optimizers of ours
    model = compiled("functional", embedding("whole"))
    losses_of(model, 3)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert rows_of(loaded.layers[1]) == rows_of(model.layers[1])
    np.testing.assert_allclose(losses_of(loaded, 10), losses_of(model, 10), rtol=1e-5)


def check_files_without_rows_load_and_say_so(tmp_path):
    layer = embedding("without")
    model = compiled("functional", layer)
    path = str(tmp_path / "m.weights.h5")
    model.fit(IDS, LABELS, verbose=0)
    sok.save_weights(model, path)  # which puts them beside it
    rows = rows_of(layer)
    with pytest.warns(UserWarning, match="No rows .*'without.*holds none"):
        model.load_weights(path)
    assert rows_of(layer) == rows
    layer.var.erase([1, 2])
    sok.load_weights(model, path)
    assert rows_of(layer) == rows


def check_rows_of_another_width_are_refused(tmp_path):
    model, other = (functional(embedding(f"of_{dim}", embedding_vec_size=dim)) for dim in (4, 2))
    model(IDS)
    other(IDS)
    model.save_weights(tmp_path / "m.weights.h5")
    store = {}
    model.layers[1].save_own_variables(store)
    rows = rows_of(other.layers[1])
    with pytest.raises((ValueError, tf.errors.OpError), match="of_2|dim"):
        other.layers[1].load_own_variables(store)
    cut = {**store, "sok_table": store["sok_table"][:-5]}
    with pytest.raises(tf.errors.DataLossError, match="offset"):
        model.layers[1].load_own_variables(cut)
    assert rows_of(other.layers[1]) == rows


def check_hdf5_files_leave_rows_out_and_say_so(tmp_path):
    layer = embedding()
    model = functional(layer)
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.losses.MeanSquaredError())
    model.fit(IDS, LABELS, verbose=0)
    path = str(tmp_path / "m.h5")
    with pytest.warns(UserWarning, match=f"rows of embedding table '{layer.var.table_name}' are not saved here"):
        model.save(path)
    with pytest.warns(UserWarning, match="are not saved here"):
        loaded = keras.models.load_model(path, compile=False)
    np.testing.assert_array_equal(loaded.layers[-1].get_weights()[0], model.layers[-1].get_weights()[0])
    assert rows_of(loaded.layers[1]) == {}
    if not IS_KERAS_3:  # which has this format no more
        rows = rows_of(layer)
        model.save_weights(path)
        model.load_weights(path)
        assert rows_of(layer) == rows


def check_exports_are_refused(tmp_path):
    model = functional(embedding())
    with pytest.raises(NotImplementedError, match="cannot go into a SavedModel"):
        model.export(str(tmp_path / "e"))
    assert not Path(tmp_path / "e" / "saved_model.pb").exists()
