"""Callbacks and weights of Keras' `fit`: on all ranks what they do on one."""

import keras
import numpy as np
import pytest
import tf_keras

import sok
from tests.multiprocess.checks_convert import BATCH, STEPS, deep_fm, samples, trained_stock
from tests.multiprocess.training import by_rank_0, shared_folder


def check_callbacks_do_what_they_do_on_one_worker_with_weights_of_samples(world, tmp_path_of_rank):
    weights = np.random.default_rng(5).random(STEPS * BATCH).astype("float32")
    weighted(world, tmp_path_of_rank, lambda part: {"sample_weight": weights[part]})


def check_callbacks_do_what_they_do_on_one_worker_with_weights_of_classes(world, tmp_path_of_rank):
    weighted(world, tmp_path_of_rank, lambda part: {"class_weight": {0: 0.3, 1: 2.0}})


def weighted(world, tmp_path_of_rank, weights):
    ids, labels = samples(2)
    labels = (labels > 0).astype("float32")
    model = deep_fm(keras, 2)
    sok.broadcast_variables(model.variables)
    weights_before = model.get_weights()
    sok.distributed_model(model)

    def train(made, part, optimizer, callbacks):
        folder = tmp_path_of_rank / f"logs{len(callbacks)}_{next(iter(weights(part)))}"
        callbacks = [
            *callbacks,
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=1e3),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, min_delta=1e3),
            *([keras.callbacks.CSVLogger(f"{folder}.csv"), keras.callbacks.TensorBoard(folder)] * (world.rank == 0)),
        ]
        auc = keras.metrics.AUC(from_logits=True, num_thresholds=50, name="auc")  # of all workers' samples
        made.compile(optimizer, "mse", weighted_metrics=["mae", auc])
        history = made.fit(
            *([c[part] for c in ids], labels[part]),
            **weights(part),
            validation_data=([c[part] for c in ids], labels[part]),
            batch_size=len(labels[part]) // STEPS,
            steps_per_epoch=STEPS,
            epochs=8,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        ).history
        if world.rank == 0:
            assert len(folder.with_suffix(".csv").read_text().splitlines()) == 1 + len(history["loss"])
            assert list(folder.rglob("*tfevents*"))
        history = {name: [float(value) for value in values] for name, values in history.items()}
        return history, made.predict(ids, batch_size=BATCH, verbose=0).tolist()

    def stock():
        made = deep_fm(keras, 2)
        made.set_weights(weights_before)
        return train(made, slice(None), keras.optimizers.SGD(0.1), [])

    expected, at_last = by_rank_0(stock)
    sgd = sok.DistributedOptimizer(keras.optimizers.SGD(0.1))
    mine = slice(world.rank, None, world.size)
    came, at_last_of_ours = train(model, mine, sgd, [sok.callbacks.MetricSumCallback()])
    assert len(expected["loss"]) == len(came["loss"]) == 4
    for name in ("learning_rate", "loss", "val_loss", "mae", "auc", "val_auc"):
        np.testing.assert_allclose(came[name], expected[name], rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(at_last_of_ours, at_last, rtol=1e-4, atol=1e-5)


class Interrupt(Exception):
    """What ends a `fit` that is to go on later."""


def backed_up(world, library, folder):
    """After an interrupt at the beginning of the third epoch another model goes on there, on as many workers."""
    ids, labels = samples(2)
    mine = np.arange(STEPS * BATCH).reshape(STEPS, world.size, -1)[:, world.rank].ravel()
    begun, first = [], deep_fm(library, 2)
    sok.broadcast_variables(first.variables)
    weights = first.get_weights()

    def interrupt(epoch, logs):
        begun.append(epoch)
        if begun == [0, 1, 2]:
            raise Interrupt

    def fit():
        model = deep_fm(library, 2)
        model.set_weights(weights)  # the second one's are not these after two epochs
        sok.distributed_model(model)
        model.compile(sok.DistributedOptimizer(library.optimizers.Adam(0.02)), "mse")
        callbacks = [
            sok.callbacks.BackupAndRestore(folder),
            library.callbacks.LambdaCallback(on_epoch_begin=interrupt),
        ]
        batch = BATCH // world.size
        model.fit(
            [c[mine] for c in ids],
            labels[mine],
            batch_size=batch,
            epochs=4,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return model

    with pytest.raises(Interrupt):
        fit()
    assert folder.is_dir()
    found = fit().predict(ids, batch_size=BATCH, verbose=0)
    assert begun == [0, 1, 2, 2, 3] and not folder.exists()
    adam = library.optimizers.Adam(0.02)
    expected = by_rank_0(lambda: trained_stock(deep_fm(library, 2), weights, adam, ids, labels, 4))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def check_a_fit_of_keras_3_goes_on_where_it_was_interrupted(world, tmp_path_of_rank):
    backed_up(world, keras, shared_folder(tmp_path_of_rank) / "keras_3")


def check_a_fit_of_tf_keras_goes_on_where_it_was_interrupted(world, tmp_path_of_rank):
    backed_up(world, tf_keras, shared_folder(tmp_path_of_rank) / "tf_keras")
