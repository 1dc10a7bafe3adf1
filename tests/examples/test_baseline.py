"""The logistic regressions beside the model, against Adagrad written out in NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from criteo import backends
from criteo.baseline import L2, LEARNING_RATE, LogisticRegressions
from criteo.train import parse_arguments

import sok

FEATURES, DENSE, VALUES, LOG_ODDS = 3, 2, 20, -0.7


@pytest.fixture
def batches():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, VALUES, [4, 32, FEATURES]) + VALUES * np.arange(FEATURES)  # each column has its own
    dense = rng.normal(size=[4, 32, DENSE]).astype(np.float32)
    return keys, dense, rng.integers(0, 2, [4, 32]).astype(np.float32)


def numpy_logits(keys, dense, labels, l2, steps):
    """Logits of all batches after Adagrad's steps on some of them."""
    weights = {"row": np.zeros(VALUES * FEATURES), "dense": np.zeros(DENSE), "bias": np.zeros(1)}
    sums = {name: np.full(w.shape, 0.1) for name, w in weights.items()}

    def logits(b):
        return LOG_ODDS + weights["row"][keys[b]].sum(axis=1) + dense[b] @ weights["dense"] + weights["bias"]

    for b in steps:
        error = (1 / (1 + np.exp(-logits(b))) - labels[b]) / labels[b].size
        gradients = {"row": np.zeros(VALUES * FEATURES), "dense": error @ dense[b], "bias": error.sum(keepdims=True)}
        for row_keys, e in zip(keys[b], error, strict=True):
            for key in row_keys:
                gradients["row"][key] += e + l2 * weights["row"][key] / labels[b].size
        for name, g in gradients.items():
            sums[name] += g * g
            weights[name] -= LEARNING_RATE * g / np.sqrt(sums[name] + 1e-7)
    return np.stack([logits(b) for b in range(len(keys))])


def test_each_column_is_a_logistic_regression_and_scouts_learn_from_less(batches):
    keys, dense, labels = batches
    sok.shutdown()
    backend = backends.Sok(parse_arguments([]), FEATURES)
    model = LogisticRegressions(backend.embed, LOG_ODDS)
    inputs = [{"dense": tf.constant(d), "keys": tf.constant(k)} for k, d in zip(keys, dense, strict=True)]
    model(inputs[0])
    optimizer = backend.optimizer("adagrad", LEARNING_RATE, initial_accumulator_value=0.1)
    for b in range(4):
        before = model(inputs[b]).numpy()
        with tf.GradientTape() as tape:
            loss, scout_losses = model.losses_of_batch(inputs[b], labels[b], scouts_learn=float(b < 3))
            loss /= labels[b].size
        logits = before[:, len(L2) :]
        expected = np.log1p(np.exp(logits)) - labels[b][:, None] * logits
        np.testing.assert_allclose(scout_losses, expected.sum(axis=0), rtol=1e-5)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    ours = np.stack([model(x).numpy() for x in inputs])
    for column, l2 in enumerate(L2 + L2):
        steps = range(4) if column < len(L2) else range(3)
        np.testing.assert_allclose(ours[:, :, column], numpy_logits(keys, dense, labels, l2, steps), atol=1e-4)
    sok.shutdown()
