"""Mixed precision, under Keras 3 and tf_keras: rows and rules in float32, vectors in 16 bit, scaled losses."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.layers import for_keras
from tests.messages import saying

LIBRARIES = {"keras": keras, "tf_keras": tf_keras}
# Where ordinary variables and their optimizer are. tests/device runs these tests with tables elsewhere; what stands for
# a GPU in the emulator has no kernels of dense layers.
DENSE = "/GPU:0" if os.environ.get("SOK_DEVICE_TESTS") == "GPU" else "/CPU:0"
POLICIES = ("mixed_float16", "mixed_bfloat16")


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init()


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]


def scaler_around(library, optimizer, initial_scale):
    module = library.optimizers if library is keras else library.mixed_precision
    return module.LossScaleOptimizer(optimizer, initial_scale=initial_scale, dynamic_growth_steps=1000)


def scale_of(scaler):
    return float(np.asarray(scaler.dynamic_scale if hasattr(scaler, "dynamic_scale") else scaler.loss_scale))


def layer_of(library, kind, policy):
    layers = for_keras(library)
    options = {"embedding_initializer": library.initializers.RandomUniform(-1.0, 1.0, seed=3), "dtype": policy}
    if kind == "pooled":
        return layers.DistributedEmbedding("mean", 50, 4, slot_num=2, max_nnz=3, **options)
    return layers.All2AllDenseEmbedding(50, 4, slot_num=2, nnz_per_slot=1, **options)


def ids_of(rng, batch=8, high=9):
    return tf.constant(rng.integers(0, high, (batch, 2, 1)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["pooled", "dense"])
def test_vectors_are_short_and_rows_and_gradients_are_not(call, library, kind, policy, rng):
    layer, ids = layer_of(library, kind, policy), ids_of(rng)
    layer(ids)

    def step():
        with tf.GradientTape() as tape:
            out = layer(ids)
            loss = tf.reduce_sum(tf.cast(out, tf.float32) ** 2)
        gradient = tape.gradient(loss, layer.embedding_variable)
        return out, gradient.values

    out, gradient = call(step)
    assert out.dtype == policy.removeprefix("mixed_") and gradient.dtype == tf.float32
    assert sok.export(layer.embedding_variable)[1].dtype == np.float32


def train(call, library, optimizer, scale_loss, steps, rng, policy="mixed_float16"):
    """Rows and the dense weight after some steps of a small model."""
    layer = layer_of(library, "pooled", policy)
    with tf.device(DENSE):
        weight = (keras.Variable if library is keras else tf.Variable)(np.full([4, 1], 0.5, np.float32))
    layer(ids_of(rng))
    variables = [layer.embedding_variable, weight]

    def step(ids):
        with tf.GradientTape() as tape:
            out = layer(ids)
            product = tf.matmul(tf.reshape(out, [-1, 4]), tf.cast(tf.convert_to_tensor(weight), out.dtype))
            loss = tf.reduce_mean(tf.cast(product, tf.float32) ** 2)
            scaled = scale_loss(loss)
        gradients = tape.gradient(scaled, [variables[0], weight.value if library is keras else weight])
        if library is tf_keras and hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)
        with tf.device(DENSE):
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        return loss

    losses = [float(call(step, ids_of(rng))) for _ in range(steps)]
    keys, rows = (x.numpy() for x in sok.export(layer.embedding_variable))
    return losses, rows[np.argsort(keys)], np.asarray(weight)


def scaling(library, optimizer):
    return optimizer.scale_loss if library is keras else optimizer.get_scaled_loss


@pytest.mark.parametrize("stock", ["SGD", "Adam"])
def test_a_scaled_loss_trains_as_one_that_is_not(call, library, stock):
    """A scale that is a power of two changes no digit, so the results are the same ones."""
    found = []
    for scale in (None, 2.0**7):
        optimizer = sok.DistributedOptimizer(getattr(library.optimizers, stock)(0.05))
        scale_loss = lambda loss: loss  # noqa: E731
        if scale is not None:
            optimizer = scaler_around(library, optimizer, scale)
            scale_loss = scaling(library, optimizer)
        found.append(train(call, library, optimizer, scale_loss, 6, np.random.default_rng(4)))
    for plain, scaled in zip(*found, strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=1e-6, atol=1e-8)
    assert found[1][0][-1] < found[1][0][0]


def test_steps_that_overflow_are_left_out(call, library):
    """Losses times 2^40 have gradients that float16 cannot hold: nothing changes but the scale, until it is small."""
    optimizer = sok.DistributedOptimizer(library.optimizers.SGD(0.5))
    scaler = scaler_around(library, optimizer, 2.0**40)
    scale_loss = scaling(library, scaler)
    layer = layer_of(library, "pooled", "mixed_float16")
    ids = tf.constant([[[1], [2]]], tf.int64)
    before = layer(ids).numpy()
    with tf.device(DENSE):
        weight = (keras.Variable if library is keras else tf.Variable)(1.0)
    variables = [layer.embedding_variable, weight]

    def step():
        with tf.GradientTape() as tape:
            out = layer(ids)
            loss = tf.reduce_sum(tf.cast(out, tf.float32) * tf.convert_to_tensor(weight))
            scaled = scale_loss(loss)
        gradients = tape.gradient(scaled, [variables[0], weight.value if library is keras else weight])
        if library is tf_keras:
            gradients = scaler.get_unscaled_gradients(gradients)
        with tf.device(DENSE):
            scaler.apply_gradients(list(zip(gradients, variables, strict=True)))

    for done in range(1, 4):
        call(step)
        np.testing.assert_array_equal(layer(ids).numpy(), before)
        assert scale_of(scaler) == 2.0 ** (40 - done)
        assert np.asarray(weight) == 1.0
        # tf_keras counts steps that it leaves out, Keras 3 does not.
        assert int(np.asarray(optimizer.iterations)) == (done if library is tf_keras else 0)
    for _ in range(30):
        call(step)
    assert np.isfinite(layer(ids).numpy()).all() and np.asarray(weight) != 1.0
    assert (layer(ids).numpy() != before).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_models_fit(library, policy):
    library.mixed_precision.set_global_policy(policy)
    try:
        layer = for_keras(library).DistributedEmbedding("sum", 100, 4, slot_num=3, max_nnz=2)
        ids = library.Input((3, 2), dtype="int64")
        x = library.layers.Dense(8, "relu")(library.layers.Flatten()(layer(ids)))
        model = library.Model(ids, library.layers.Dense(1, dtype="float32")(x))
        model.compile(sok.DistributedOptimizer(library.optimizers.Adam(0.02)), "mse")
    finally:
        library.mixed_precision.set_global_policy("float32")
    assert type(model.optimizer).__name__.startswith("LossScaleOptimizer") == (policy == "mixed_float16")
    rng = np.random.default_rng(0)
    keys, labels = rng.integers(0, 9, (64, 3, 2)), rng.normal(size=(64, 1))
    losses = model.fit(keys, labels, epochs=12, batch_size=16, verbose=0).history["loss"]
    assert layer.compute_dtype == policy.removeprefix("mixed_") and losses[-1] < 0.8 * losses[0]
    assert np.abs(sok.export(layer.embedding_variable)[1]).max() > 0.05  # the rows trained too


def test_scalers_inside_are_refused(library):
    with pytest.raises(
        ValueError, match=saying("must not scale losses", "put the LossScaleOptimizer around sok.Distributed")
    ):
        sok.DistributedOptimizer(scaler_around(library, library.optimizers.Adam(), 2.0))
