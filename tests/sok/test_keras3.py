"""The layers under Keras 3: the questions of keras_checks.py, and what only Keras 3 has."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.sok import (
    keras_checks,
    keras_conversion_checks,
    keras_embedding_checks,
    keras_file_checks,
    keras_input_checks,
    keras_prefetch_checks,
)

if not keras_checks.IS_KERAS_3:
    pytest.skip("this process has tf_keras for tf.keras", allow_module_level=True)

globals().update(
    keras_checks.checks_as_tests(
        keras_checks,
        keras_conversion_checks,
        keras_embedding_checks,
        keras_file_checks,
        keras_input_checks,
        keras_prefetch_checks,
    )
)


def test_xla_is_off_for_models_with_our_layers():
    # Keras decides by this flag on machines with a GPU; set later than in the constructor, it is not looked at.
    layer = keras_checks.embedding()
    assert layer.supports_jit is False
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    with pytest.warns(UserWarning, match="jit_compile"):
        model.compile("sgd", "mse", jit_compile=True)
    assert not model.jit_compile


def test_an_output_of_known_dtype_and_shape_without_running():
    ids = keras.Input((2,), dtype="int64", batch_size=8)
    out = keras_checks.embedding(dtype="mixed_float16")(ids)
    assert (out.dtype, out.shape[1:]) == ("float16", (2, 4))


def test_clones_have_tables_of_their_own():
    layer = keras_checks.embedding()
    model = keras_checks.functional(layer)
    clone = keras.models.clone_model(model)
    clone(tf.constant(keras_checks.IDS), training=True)
    assert clone.layers[1].var is not layer.var
    assert (int(layer.var.size()), int(clone.layers[1].var.size())) == (0, 6)


def test_a_scheduler_reaches_the_rows():
    layer = keras_checks.embedding()
    model = keras_checks.compiled("functional", layer)
    model.fit(keras_checks.IDS, keras_checks.LABELS, verbose=0)
    before = layer.var.sparse_read(np.arange(10)).numpy()
    stop = keras.callbacks.LearningRateScheduler(lambda _: 0.0)
    model.fit(keras_checks.IDS, keras_checks.LABELS, verbose=0, callbacks=[stop])
    np.testing.assert_array_equal(layer.var.sparse_read(np.arange(10)), before)
