"""From what a person calls an initializer to what the native table makes fresh rows from."""

import math

import numpy as np
import pytest
import tensorflow as tf

from sok.table import initializers
from sok.table.initializers import InitializerSpec, to_spec
from sok.table.table import EmbeddingVariable
from tests.messages import saying

ROWS, DIM = 900, 12  # the shape that Keras would draw: far from square, so that the fans differ
DRAWN = (4000, 50)


def keras_modules():
    import keras
    import tf_keras

    return {"keras": keras.initializers, "tf_keras": tf_keras.initializers}


@pytest.mark.parametrize(
    "name, kind, a, b",
    [
        (None, "uniform", -0.05, 0.05),
        ("uniform", "uniform", -0.05, 0.05),
        ("RandomUniform", "uniform", -0.05, 0.05),
        ("random_normal", "normal", 0.0, 0.05),
        ("Normal", "normal", 0.0, 0.05),
        ("TRUNCATED_NORMAL", "truncated_normal", 0.0, 0.05),
        ("zeros", "constant", 0.0, 0.0),
        ("Ones", "constant", 1.0, 0.0),
        ("constant", "constant", 0.0, 0.0),
        ("GlorotUniform", "uniform", -math.sqrt(6 / (ROWS + DIM)), math.sqrt(6 / (ROWS + DIM))),
        ("he_uniform", "uniform", -math.sqrt(6 / ROWS), math.sqrt(6 / ROWS)),
        ("Lecun Uniform", "uniform", -math.sqrt(3 / ROWS), math.sqrt(3 / ROWS)),
        ("HeNormal", "truncated_normal", 0.0, math.sqrt(2 / ROWS) / 0.87962566103423978),
    ],
)
def test_names_in_any_spelling(name, kind, a, b):
    spec = to_spec(name, ROWS, DIM)
    assert (spec.kind, spec.seed, spec.bank) == (kind, None, ())
    assert (spec.a, spec.b) == pytest.approx((a, b))


NAMES = ["random_uniform", "random_normal", "truncated_normal", "variance_scaling", "zeros", "ones"]
NAMES += [f"{family}_{kind}" for family in ("glorot", "he", "lecun") for kind in ("uniform", "normal")]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_distributed_as_keras_draws_them(name):
    drawn = np.asarray(keras_modules()["keras"].get(name)(DRAWN, "float32"))
    rows = EmbeddingVariable(DRAWN[1], DRAWN[0], initializer=name, seed=3).sparse_read(np.arange(DRAWN[0])).numpy()
    spread = float(drawn.std())
    # 200 000 draws: the deviation of a mean is spread / 450, of a deviation less than spread / 600.
    assert rows.mean() == pytest.approx(drawn.mean(), abs=0.015 * spread + 1e-12)
    assert rows.std() == pytest.approx(spread, rel=0.015, abs=1e-12)
    assert np.abs(rows).max() == pytest.approx(np.abs(drawn).max(), rel=0.2)
    if name.endswith(("uniform", "truncated_normal", "scaling")) or "he_" in name:  # these have hard bounds
        assert np.abs(rows).max() == pytest.approx(np.abs(drawn).max(), rel=1e-3)


@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.parametrize(
    "make, kind, a, b, seed",
    [
        (lambda k: k.RandomUniform(-1, 2, seed=7), "uniform", -1, 2, 7),
        (lambda k: k.RandomNormal(1, 2), "normal", 1, 2, None),
        (lambda k: k.TruncatedNormal(1, 2, seed=0), "truncated_normal", 1, 2, 0),
        (lambda k: k.Constant(2.5), "constant", 2.5, 0, None),
        (lambda k: k.Zeros, "constant", 0, 0, None),
        (lambda k: k.HeNormal(), "truncated_normal", 0, math.sqrt(2 / ROWS) / 0.87962566103423978, None),
        (lambda k: k.VarianceScaling(3.0, "fan_out", "untruncated_normal"), "normal", 0, math.sqrt(3 / DIM), None),
        (
            lambda k: k.VarianceScaling(3.0, "fan_avg", "uniform", seed=4),
            "uniform",
            -math.sqrt(18 / (ROWS + DIM)),
            math.sqrt(18 / (ROWS + DIM)),
            4,
        ),
    ],
    ids=range(8),
)
def test_objects_of_either_keras(module, make, kind, a, b, seed):
    spec = to_spec(make(keras_modules()[module]), ROWS, DIM)
    assert (spec.kind, spec.seed) == (kind, seed)
    assert (spec.a, spec.b) == pytest.approx((a, b))


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: tf.compat.v1.random_uniform_initializer(0, None), InitializerSpec("uniform", 0.0, 1.0)),
        (lambda: tf.compat.v1.constant_initializer(3.0), InitializerSpec("constant", 3.0)),
        (
            lambda: tf.compat.v1.truncated_normal_initializer(1, 2, seed=5),
            InitializerSpec("truncated_normal", 1, 2, seed=5),
        ),
        (lambda: tf.random_normal_initializer(1, 2), InitializerSpec("normal", 1, 2)),
        (lambda: tf.compat.v1.glorot_normal_initializer(), to_spec("glorot_normal", ROWS, DIM)),
    ],
    ids=range(5),
)
def test_objects_of_tensorflow(make, expected):
    assert to_spec(make(), ROWS, DIM) == expected


def test_another_callable_fills_a_bank_of_which_rows_pick_their_elements():
    calls = []

    def numbers(shape, dtype):
        calls.append((tuple(shape), dtype))
        return tf.reshape(tf.range(shape[0] * shape[1], dtype=dtype), shape)

    variable = EmbeddingVariable(3, 50, initializer=numbers)
    rows = variable.sparse_read(np.arange(500)).numpy()
    assert calls == [((50, 3), tf.float32)]
    assert set(rows[:, 1]) == {3.0 * h + 1 for h in range(50)}  # every column from its own numbers, all of them
    assert np.unique(rows[:, 0] // 3 - rows[:, 1] // 3).size > 50  # elements of a row come from several bank rows


def test_a_bank_has_at_most_4096_rows():
    sizes = []
    to_spec(lambda shape, dtype: sizes.append(shape) or np.zeros(shape), 10**7, 2)
    assert sizes == [(4096, 2)]


@pytest.mark.parametrize("graph", [False, True])
def test_initializers_without_a_formula_work_in_both_modes(graph):
    def spec():
        return to_spec("orthogonal", 64, 4)

    if graph:
        with tf.Graph().as_default():
            found = spec()
    else:
        found = spec()
    bank = np.array(found.bank).reshape(64, 4)
    np.testing.assert_allclose(bank.T @ bank, np.eye(4), atol=1e-5)


def test_an_initializer_of_ones_own_is_called_whatever_its_name():
    class Zeros(keras_modules()["keras"].Initializer):
        def __call__(self, shape, dtype=None):
            return tf.fill(shape, 2.0)

    assert set(to_spec(Zeros(), 5, 2).bank) == {2.0}


@pytest.mark.parametrize(
    "initializer, error, text",
    [
        ("no_such", ValueError, "Keras knows.* 'no_such'"),
        (3.5, TypeError, "callable.* Received: 3.5"),
        (
            lambda shape, dtype: np.zeros([1, 2]),
            ValueError,
            r"\(8, 2\).*\(1, 2\)",
        ),
        (lambda shape, dtype: np.full(shape, "a"), ValueError, "must return numbers"),
        (lambda shape, dtype: np.full(shape, np.nan), ValueError, "finite float32 numbers. Received: 16 of 16"),
        (lambda shape, dtype: np.full(shape, 1e300), ValueError, "finite float32"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_what_is_no_initializer_is_refused(initializer, error, text):
    with pytest.raises(error, match=text):
        to_spec(initializer, 8, 2)


def test_the_argument_is_named_as_the_caller_calls_it():
    with pytest.raises(ValueError, match=saying("`embedding_initializer`")):
        initializers.resolve("no_such", "embedding_initializer")
