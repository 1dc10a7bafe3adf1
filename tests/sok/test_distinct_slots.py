"""An id and its slot together are the key of a row, if a layer is told so."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.layers import for_keras
from tests.messages import saying

SLOTS = 3


def layer(name, kind="DistributedEmbedding", **arguments):
    sizes = {"max_nnz": 4, "combiner": "sum"} if kind == "DistributedEmbedding" else {"nnz_per_slot": 1}
    return getattr(sok, kind)(
        max_vocabulary_size_per_gpu=1000, embedding_vec_size=4, slot_num=SLOTS, name=name, **sizes, **arguments
    )


def expected(table, ids, weights=None):
    """The sum of the rows of `ids`, a list for each slot of each sample, by a loop."""
    result = np.zeros([len(ids), SLOTS, 4], np.float32)
    for b, sample in enumerate(ids):
        for slot, of_slot in enumerate(sample):
            for i, key in enumerate(of_slot):
                row = table.sparse_read(tf.constant([key * SLOTS + slot], table.key_dtype)).numpy()[0]
                result[b, slot] += row * (1.0 if weights is None else weights[b][slot][i])
    return result


IDS = [[[7], [7, 7], []], [[-9], [0], [7, 1, 2]]]


@pytest.mark.parametrize("form", ["ragged", "ragged matrix", "sparse matrix", "sparse cube", "dense"])
def test_each_slot_has_rows_of_its_own(form):
    distinct = layer(f"distinct_{form}".replace(" ", "_"), distinct_slots=True, padding_key=-1)
    ragged = tf.ragged.constant(IDS, dtype=tf.int64)
    inputs = {
        "ragged": lambda: ragged,
        "ragged matrix": lambda: ragged.values,
        "sparse matrix": lambda: ragged.values.to_sparse(),
        "sparse cube": lambda: ragged.to_sparse(),
        "dense": lambda: ragged.to_tensor(-1),
    }[form]()
    found = distinct(inputs)
    np.testing.assert_allclose(found, expected(distinct.embedding_variable, IDS), rtol=1e-6)
    pairs = {(slot, key) for sample in IDS for slot, ids in enumerate(sample) for key in ids}
    assert int(distinct.embedding_variable.size()) == len(pairs)
    assert len(np.unique(found.numpy()[0, :2, 0])) == 2, "id 7 of two slots has two rows"


def test_slots_without_it_share_rows():
    shared = layer("shared_slots")
    shared(tf.constant([[7, 7, 7]], tf.int64))
    assert int(shared.embedding_variable.size()) == 1


@pytest.mark.parametrize("nnz", [1, 2])
def test_rows_that_are_not_pooled(nnz):
    distinct = sok.All2AllDenseEmbedding(1000, 4, SLOTS, nnz, name=f"distinct_rows_{nnz}", distinct_slots=True)
    ids = np.tile(np.array([[5], [5], [6]])[None], [2, 1, nnz])
    rows = distinct(tf.constant(ids, tf.int64)).numpy()
    keys = distinct.embedding_variable.export()[0].numpy()
    assert sorted(keys) == [5 * SLOTS, 5 * SLOTS + 1, 6 * SLOTS + 2]
    wanted = distinct.embedding_variable.sparse_read(tf.constant(ids * SLOTS + np.arange(SLOTS)[:, None], tf.int64))
    np.testing.assert_array_equal(rows, wanted)


@pytest.mark.parametrize("dtype", [tf.int64, tf.int32, tf.uint32, tf.uint64])
@pytest.mark.parametrize("kind", ["DistributedEmbedding", "All2AllDenseEmbedding"])
def test_an_id_that_is_too_large_is_named(kind, dtype):
    distinct = layer(f"too_large_{kind}_{dtype.name}", kind, distinct_slots=True, key_dtype=dtype)
    fits = dtype.max // SLOTS - 1
    distinct(tf.constant([[0, 1, fits]], dtype))
    assert int(distinct.embedding_variable.size()) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("distinct_slots", f"id {fits + 2} ", "int64")):
        distinct(tf.constant([[0, fits + 2, 1]], dtype))
    assert int(distinct.embedding_variable.size()) == 3


def test_what_is_wrong_with_ids_is_said_as_without():
    distinct = layer("distinct_wrong", distinct_slots=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("max_nnz")):
        distinct(tf.ragged.constant([[[1] * 5, [], []]], dtype=tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("dense_shape")):
        distinct(tf.SparseTensor([[7, 0]], tf.constant([1], tf.int64), [3, 1]))
    assert int(distinct.embedding_variable.size()) == 0


def test_arguments_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=saying("`distinct_slots`", "use_hashtable", "add_offsets")):
        layer("distinct_identity", distinct_slots=True, use_hashtable=False)
    with pytest.raises(ValueError, match=saying("`distinct_slots`", "dynamic_input")):
        sok.All2AllDenseEmbedding(10, 4, 2, 1, dynamic_input=True, distinct_slots=True)


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_model_trains_saves_and_exports(library, tmp_path):
    inputs = library.Input([SLOTS], dtype="int64")
    rows = for_keras(library).DistributedEmbedding(
        "sum", 1000, 4, SLOTS, 1, distinct_slots=True, name=f"distinct_model_{library.__name__}"
    )(inputs)
    model = library.Model(inputs, library.layers.Dense(1)(library.layers.Flatten()(rows)))
    model.compile(sok.DistributedOptimizer(library.optimizers.Adam(0.05)), "mse")
    ids = np.random.default_rng(0).integers(0, 5, [64, SLOTS])
    labels = ids @ np.array([1.0, -1.0, 0.5])  # what no shared row could tell
    model.fit(ids, labels, epochs=60, batch_size=16, verbose=0)
    assert model.evaluate(ids, labels, verbose=0) < 0.05
    again = library.Model.from_config(model.get_config(), {"DistributedEmbedding": type(model.layers[1])})
    assert again.layers[1].distinct_slots
    sok.export_saved_model(model, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    (found,) = served(**{next(iter(served.structured_input_signature[1])): tf.constant(ids)}).values()
    np.testing.assert_allclose(found, model.predict(ids, verbose=0), rtol=1e-5, atol=1e-6)
