"""Metrics over the samples of all workers equal those of one worker that has them all."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.keras.metrics import for_keras
from tests.messages import saying

BATCHES, NAMES = 3, ("loss", "auc", "binary_accuracy", "recall")


def samples(seed):
    """Batches of one job with all samples; a worker has every R-th of those whose number it is, in as many batches."""
    rng = np.random.default_rng(seed)
    x = rng.random([60, 1]).astype(np.float32).round(2)
    return x, (rng.random(60) < 0.3 + 0.4 * x[:, 0]).astype(np.float32)[:, None]


def mine(world, arrays):
    """This worker's share as a dataset, of another number of samples on each worker, but of BATCHES batches."""
    bounds = [0, *range(12, 60, 48 // world.size)][: world.size] + [60]
    share = slice(bounds[world.rank], bounds[world.rank + 1])
    parts = [array[share] for array in arrays]
    return tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(-(-len(parts[0]) // BATCHES))


def model_of(library, auc):
    model = library.Sequential([library.Input((1,)), library.layers.Dense(1, "sigmoid", kernel_initializer="ones")])
    model.compile(library.optimizers.SGD(0.0), "binary_crossentropy", metrics=[auc, "binary_accuracy", recall(library)])
    return model


def recall(library):
    return library.metrics.Recall(0.6, name="recall")


def expected_of(library, arrays):
    """What one worker says of all samples, with stock metrics."""
    model = model_of(library, library.metrics.AUC(num_thresholds=50, name="auc"))
    return model.evaluate(*arrays, batch_size=60, verbose=0, return_dict=True)


def compare(world, library):
    training, validation = samples(1), samples(2)
    expected, expected_val = expected_of(library, training), expected_of(library, validation)
    model = model_of(library, for_keras(library).AUC(num_thresholds=50, name="auc"))
    callback = sok.callbacks.MetricSumCallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = model.fit(
            mine(world, training),
            validation_data=mine(world, validation),
            epochs=3,
            shuffle=False,
            validation_freq=2,
            verbose=0,
            callbacks=[callback],
        ).history
        found = model.evaluate(mine(world, validation), verbose=0, return_dict=True, callbacks=[callback])
        again = model.evaluate(mine(world, training), verbose=0, callbacks=[sok.callbacks.MetricSumCallback()])
    for name in NAMES:
        np.testing.assert_allclose(history[name], [expected[name]] * 3, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(history[f"val_{name}"], [expected_val[name]], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found[name], expected_val[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(again, [expected[name] for name in NAMES], rtol=1e-5)


def check_metrics_of_keras_3_are_of_all_samples(world):
    compare(world, keras)


def check_metrics_of_tf_keras_are_of_all_samples(world):
    compare(world, tf_keras)


def check_an_evaluation_of_unknown_length_says_what_it_needs(world):
    model, data = model_of(keras, sok.metrics.AUC(name="auc")), mine(world, samples(2))
    unknown = data.filter(lambda *batch: True)
    callbacks = [sok.callbacks.MetricSumCallback()]
    if world.size > 1:
        with pytest.raises(ValueError, match=saying("steps=", "assert_cardinality")):
            model.evaluate(unknown, verbose=0, callbacks=callbacks)
    found = model.evaluate(unknown, steps=BATCHES, verbose=0, return_dict=True, callbacks=callbacks)
    np.testing.assert_allclose(found["loss"], expected_of(keras, samples(2))["loss"], rtol=1e-5)


def check_an_auc_that_nobody_sums_says_so(world):
    auc = sok.metrics.AUC()
    auc.update_state([0, 1], [0.1, 0.9])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        auc.reset_state()
        auc.reset_state()
        auc.update_state([0, 1], [0.1, 0.9])
        sok.metrics.sum_over_workers([auc])
        auc.reset_state()
    texts = [str(warning.message) for warning in said if "MetricSumCallback" in str(warning.message)]
    assert len(texts) == (world.size > 1), texts


def check_metrics_that_cannot_be_summed_are_named(world):
    class Odd(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="odd")
            self.value = self.add_variable((), "zeros")

        def update_state(self, *args, **options):
            self.value.assign_add(1.0)

        def result(self):
            return self.value

    odd = Odd()
    with pytest.raises(TypeError, match=saying("'odd'", "sums_over_workers")):
        sok.metrics.sum_over_workers([keras.metrics.Mean(), odd])
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[odd])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(mine(world, samples(1)), epochs=2, verbose=0, callbacks=[sok.callbacks.MetricSumCallback()])
    assert len([w for w in said if "'odd'" in str(w.message)]) == (world.size > 1)
    odd.sums_over_workers, before = True, float(odd.value)
    sok.metrics.sum_over_workers([odd])
    assert float(odd.value) == before * world.size


def check_workers_with_other_metrics_all_say_so(world):
    metrics = [keras.metrics.Mean(name=f"of_{world.rank}")]
    if world.size > 1:
        with pytest.raises(ValueError, match=saying("of_0", "of_1", "rank 1")):
            sok.metrics.sum_over_workers(metrics)


def check_exact_auc_is_of_all_samples(world):
    x, y = (array[:, 0] for array in samples(3))
    weight = np.random.default_rng(4).random(60)
    wins = (x[:, None] > x) + 0.5 * (x[:, None] == x)  # ties are many: two digits
    pairs = (y * weight)[:, None] * ((1 - y) * weight)
    share = slice(0, 0) if world.rank == 1 else slice(world.rank // 2, None, (world.size + 1) // 2)
    found = sok.metrics.exact_auc(y[share], x[share], weight[share])
    np.testing.assert_allclose(found, (wins * pairs).sum() / pairs.sum(), rtol=1e-12)
    assert np.isnan(sok.metrics.exact_auc(np.ones(3), np.arange(3)))


def check_bad_samples_of_one_worker_are_told_to_all(world):
    bad = world.rank == world.size - 1
    for arguments, words in (
        (([0, 2] if bad else [0, 1], [0.1, 0.2]), ("`labels`", "2")),
        (([0, 1], [0.1, np.nan if bad else 0.2]), ("`predictions`", "NaN", "place 1")),
        (([0, 1], [0.1] if bad else [0.1, 0.2]), ("shape", "(1,)")),
        (([0, 1], [0.1, 0.2], [1, -1 if bad else 1]), ("`sample_weight`", "negative")),
    ):
        with pytest.raises(ValueError, match=saying(*words)):
            sok.metrics.exact_auc(*arguments)
