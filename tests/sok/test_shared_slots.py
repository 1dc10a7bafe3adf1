"""Equal ids in many slots of a layer are hinted at, once, unless somebody has said that slots share rows."""

import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.lookup.shared_slots import pairs_of, shared
from tests.messages import saying

SLOTS, BATCH = 4, 64


@pytest.fixture(autouse=True)
def _no_script_for_sok(monkeypatch):
    monkeypatch.delitem(sys.modules, "sparse_operation_kit", raising=False)


def ids_of(kind, rng):
    """[BATCH, SLOTS] of columns that are numbered from 0 each; or that have keys of their own."""
    ids = rng.integers(0, 20, [BATCH, SLOTS])
    if kind == "offsets":
        return sok.data.add_offsets(ids, [20] * SLOTS).numpy()
    if kind == "hashed":
        return sok.data.hash_columns(ids, [f"c{i}" for i in range(SLOTS)]).numpy()
    if kind == "padded":  # one id is in all slots
        return np.where(ids < 10, -1, ids + 20 * np.arange(SLOTS))
    return ids


def layer_of(kind, library=keras, **options):
    layers = sok.layers.for_keras(library)
    if kind == "fixed":
        return layers.All2AllDenseEmbedding(1000, 2, SLOTS, 1, **options)
    return layers.DistributedEmbedding("sum", 1000, 2, SLOTS, 1, **options)


def told_of(told):
    return [str(w.message) for w in told if "distinct_slots" in str(w.message)]


@pytest.mark.parametrize("kind, form", [("pooled", "dense"), ("pooled", "sparse"), ("fixed", "dense")])
def test_an_eager_layer_hints_once(kind, form, rng):
    layer, ids = layer_of(kind, name="alike"), tf.constant(ids_of("numbered", rng))
    if form == "sparse":
        ids = tf.sparse.from_dense(tf.reshape(ids, [-1, 1]) + 1)
    with pytest.warns(
        UserWarning, match=saying("'alike'", "4 of 4 slots", "distinct_slots=True", "add_offsets")
    ) as told:
        for _ in range(5):
            layer(ids)
    assert len(told_of(told)) == 1


@pytest.mark.parametrize("library, kind", [(keras, "pooled"), (tf_keras, "fixed")])
def test_fit_hints_once(library, kind, rng):
    layer, ids = layer_of(kind, library, name="in_fit"), ids_of("numbered", rng)
    model = library.Sequential([library.Input([SLOTS], dtype="int64"), layer, library.layers.Flatten()])
    model.add(library.layers.Dense(1))
    model.compile(sok.DistributedOptimizer(library.optimizers.SGD(0.1)), "mse")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.evaluate(ids, np.ones([BATCH, 1]), batch_size=BATCH, verbose=0)
        assert not told_of(told)
        model.fit(ids, np.ones([BATCH, 1]), batch_size=BATCH, epochs=5, verbose=0)
    (text,) = told_of(told)
    assert "'in_fit'" in text


@pytest.mark.parametrize("kind", ["offsets", "hashed", "padded"])
def test_columns_with_keys_of_their_own_are_not_hinted_at(kind, rng):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_of("pooled")(tf.constant(ids_of(kind, rng)))


@pytest.mark.parametrize("why", ["False", "True", "few samples", "not training", "a script for SOK"])
def test_what_is_meant_or_says_little_is_not_hinted_at(why, rng, monkeypatch):
    layer = layer_of("pooled", **({"distinct_slots": why == "True"} if why in ("False", "True") else {}))
    ids = tf.constant(ids_of("numbered", rng)[: 16 if why == "few samples" else BATCH])
    if why == "a script for SOK":
        monkeypatch.setitem(sys.modules, "sparse_operation_kit", sok)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(ids, training=why != "not training")


def test_what_is_said_comes_back_from_a_configuration():
    for said in (None, False, True):
        layer = layer_of("pooled", distinct_slots=said)
        assert type(layer).from_config(layer.get_config()).distinct_slots is said


def test_only_half_of_the_slots_and_two_ids_are_a_hint():
    def found(columns):
        return shared(np.unique([(id, slot) for slot, ids in enumerate(columns) for id in ids], axis=0), len(columns))

    n = np.arange(40)
    assert found([n, n + 100, n + 200, n + 39]) is None  # one id, 39
    assert found([n, n + 100, n + 200, n + 38]) == (38, [0, 3], 2)
    assert found([n, n + 100, n + 200, n + 300, n + 38]) is None  # two slots of five
    assert shared(np.empty([0, 2], np.int64), 2) is None


def test_batches_that_say_little_are_passed_over():
    ids, splits = np.repeat(np.arange(40), 2), np.arange(81)
    assert pairs_of(ids, splits, 2).tolist() == [[i // 2, i % 2] for i in range(80)]
    assert not len(pairs_of(ids, splits[:-3], 2)) and not len(pairs_of(ids[:40], splits[:41], 2))
    many = np.arange(2**16)  # the first 2**15 keys of it, and whole samples of them
    assert len(pairs_of(many, np.append(many, 2**16), 3)) == 2**15 // 3 * 3


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_two_columns_of_many_ids_are_hinted_at_in_a_loop_of_ones_own(mode, rng):
    layer = sok.DistributedEmbedding("sum", 100_000, 2, slot_num=2, max_nnz=1, name=f"large_{mode}")
    optimizer = sok.optimizers.SGD(0.1)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        optimizer.apply_gradients([(tape.gradient(loss, layer.embedding_variable), layer.embedding_variable)])

    step = tf.function(step) if mode == "function" else step
    with pytest.warns(UserWarning, match=saying(f"'large_{mode}'", "2 of 2 slots")) as told:
        for _ in range(8):
            step(tf.constant(rng.integers(0, 1_000_000, [1024, 2])))  # one equal pair a batch, on average
    assert len(told_of(told)) == 1
