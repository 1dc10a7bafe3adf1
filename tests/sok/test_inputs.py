"""Every form of input says the same, and what says something else is refused."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from sok.layers import All2AllDenseEmbedding
from sok.lookup.feature import Csr, Feature
from sok.lookup.inputs import static_batch, to_csr, to_dense
from sok.table.table import EmbeddingVariable
from tests.group_features import lookup_pooled
from tests.messages import saying

# Three samples of two features.
IDS = [[[7, 8], []], [[], [9]], [[5, 5, 5], [6]]]
KEYS, SPLITS = [7, 8, 9, 5, 5, 5, 6], [0, 2, 2, 2, 3, 6, 7]
WEIGHTS = [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
SPACES = [[(b, f, j) for j in range(len(ids))] for b, sample in enumerate(IDS) for f, ids in enumerate(sample)]
PLACES = [place for segment in SPACES for place in segment]  # [7]: sample, feature, number


def sparse(places, values, shape, dtype):
    return tf.SparseTensor(np.array(places, np.int64), tf.constant(values, dtype), shape)


def forms(values, dtype):
    """The values [7] in every form whose segments may differ in length."""
    flat = [(b * 2 + f, j) for b, f, j in PLACES]
    ragged = tf.RaggedTensor.from_row_splits(tf.constant(values, dtype), SPLITS)
    return {
        "sparse matrix": sparse(flat, values, [6, 3], dtype),
        "sparse cube": sparse(PLACES, values, [3, 2, 3], dtype),
        "ragged matrix": ragged,
        "ragged cube": tf.RaggedTensor.from_row_splits(ragged, [0, 2, 4, 6]),
        "ragged, uniform features": tf.RaggedTensor.from_uniform_row_length(ragged, 2),
        "ragged, int32 splits": tf.RaggedTensor.from_row_splits(ragged, [0, 2, 4, 6]).with_row_splits_dtype(tf.int32),
    }


FORMS = list(forms(KEYS, tf.int64))


@functools.cache
def table_of(key_dtype):
    return EmbeddingVariable(1, 10, name="inputs", key_dtype=key_dtype)


def csr(inputs, slot_num=2, key_dtype=tf.int64, **kwargs):
    return to_csr(Feature(table_of(key_dtype), inputs, "sum", slot_num=slot_num, **kwargs))


def assert_csr(found, keys, splits, weights=None):
    assert found.keys.numpy().tolist() == keys
    assert (found.row_splits.dtype, found.row_splits.numpy().tolist()) == (tf.int64, splits)
    assert (None if found.weights is None else found.weights.numpy().tolist()) == weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms_agree(form, weighted, call):
    weights = forms(WEIGHTS, tf.float64)[form] if weighted else None
    parts = lambda c: (c.keys, c.row_splits, c.weights)  # noqa: E731 (a function gives tensors only)
    found = call(lambda i, w: parts(csr(i, weights=w)), forms(KEYS, tf.int64)[form], weights)
    assert_csr(Csr(*found), KEYS, SPLITS, WEIGHTS if weighted else None)


@pytest.mark.parametrize("form", FORMS)
def test_narrower_integers_are_widened(form):
    found = csr(forms(KEYS, tf.int32)[form])
    assert found.keys.dtype == tf.int64
    assert_csr(found, KEYS, SPLITS)


@pytest.mark.parametrize("form", FORMS)
def test_static_batch(form):
    inputs = forms(KEYS, tf.int64)[form]
    assert static_batch(inputs, 2) == 3
    assert static_batch(tf.zeros([5, 2]), 2) == 5


@pytest.mark.parametrize("form", ["sparse matrix", "sparse cube"])
def test_sparse_indices_may_come_in_any_order(form, rng):
    order = rng.permutation(len(KEYS))
    inputs, weights = ((forms(v, d)[form]) for v, d in ((KEYS, tf.int64), (WEIGHTS, tf.float32)))

    def shuffled(s):
        return tf.SparseTensor(tf.gather(s.indices, order), tf.gather(s.values, order), s.dense_shape)

    def pairs(keys, weights):
        return [sorted(zip(keys[a:b], weights[a:b], strict=True)) for a, b in zip(SPLITS[:-1], SPLITS[1:], strict=True)]

    found = csr(shuffled(inputs), weights=shuffled(weights))
    assert found.row_splits.numpy().tolist() == SPLITS
    assert pairs(found.keys.numpy().tolist(), found.weights.numpy().tolist()) == pairs(KEYS, WEIGHTS)


def test_sparse_columns_mean_nothing_in_soks_form():
    inputs = sparse([(0, 2), (1, 0), (1, 9)], [4, 5, 6], [2, 10], tf.int64)
    assert_csr(csr(inputs), [4, 5, 6], [0, 1, 3])


@pytest.mark.parametrize(
    "inputs, slot_num, splits",
    [
        ([[[1, 2, 3], [4, 5, 6]]], 2, [0, 3, 6]),
        ([[1, 2, 3], [4, 5, 6]], 3, [0, 1, 2, 3, 4, 5, 6]),
        ([[1, 2, 3], [4, 5, 6]], 1, [0, 3, 6]),
        ([[[1, 2, 3]], [[4, 5, 6]]], 1, [0, 3, 6]),
        (tf.ragged.constant([[1, 2, 3, 4], [], [5, 6]]), 1, [0, 4, 4, 6]),
        (
            sparse([(0, 0), (0, 1), (0, 3), (0, 4), (2, 0), (2, 1)], [1, 2, 3, 4, 5, 6], [3, 5], tf.int64),
            1,
            [0, 4, 4, 6],
        ),
        (tf.RaggedTensor.from_row_splits(tf.reshape(tf.range(1, 7), [3, 2]), [0, 1, 2, 3]), 1, [0, 2, 4, 6]),
        (tf.RaggedTensor.from_row_splits(tf.reshape(tf.range(1, 7), [6, 1]), [0, 2, 4, 6]), 2, [0, 1, 2, 3, 4, 5, 6]),
    ],
    ids=range(8),
)
def test_dense_and_one_feature(inputs, slot_num, splits):
    assert_csr(csr(inputs, slot_num), [1, 2, 3, 4, 5, 6], splits)


@pytest.mark.parametrize("shape", [[3, 2, 0], [0, 2, 3], [0, 2]])
def test_no_ids_at_all(shape):
    found = csr(tf.zeros(shape, tf.int64))
    assert_csr(found, [], [0] * (shape[0] * 2 + 1))


def test_padding_is_left_out_of_dense_inputs():
    ids, weights = [[[1, 0, 2], [0, 0, 0]]], [[[0.5, 9, 2], [9, 9, 9]]]
    assert_csr(csr(ids, padding_key=0, weights=weights), [1, 2], [0, 2, 2], [0.5, 2.0])
    assert_csr(csr(ids, padding_key=None), [1, 0, 2, 0, 0, 0], [0, 3, 6])
    assert_csr(csr([[-1, 3]], padding_key=-1), [3], [0, 0, 1])


@pytest.mark.parametrize(
    "spec, given, splits",
    [
        (tf.TensorSpec([None, None], tf.int64), tf.constant([[1, 2]], tf.int64), [0, 1, 2]),
        (tf.TensorSpec([None, None, None], tf.int64), tf.constant([[[1, 2], [3, 4]]], tf.int64), [0, 2, 4]),
        (tf.SparseTensorSpec([None, None, None], tf.int64), forms(KEYS, tf.int64)["sparse cube"], SPLITS),
        (tf.SparseTensorSpec(None, tf.int64), forms(KEYS, tf.int64)["sparse cube"], SPLITS),
        (tf.SparseTensorSpec(None, tf.int64), forms(KEYS, tf.int64)["sparse matrix"], SPLITS),
        (tf.RaggedTensorSpec([None, None, None], tf.int64, 2), forms(KEYS, tf.int64)["ragged cube"], SPLITS),
    ],
    ids=range(6),
)
def test_unknown_shapes(spec, given, splits):
    found = tf.function(lambda i: csr(i).row_splits, input_signature=[spec])(given)
    assert found.numpy().tolist() == splits


@pytest.mark.parametrize("form", ["sparse cube", "sparse matrix"])
def test_how_many_sizes_there_are_may_be_unknown_until_it_runs(form):
    given = forms(KEYS, tf.int64)[form]

    @tf.function
    def splits_of(dense_shape):
        told = tf.numpy_function(lambda sizes: sizes, [dense_shape], tf.int64)
        return csr(tf.SparseTensor(given.indices, given.values, told)).row_splits

    assert splits_of(given.dense_shape).numpy().tolist() == SPLITS


@pytest.mark.parametrize(
    "inputs, came",
    [
        (tf.zeros([4, 3], tf.int64), "a dense tensor of shape (4, 3), int64"),
        (tf.zeros([4, 3, 5], tf.int64), "a dense tensor of shape (4, 3, 5)"),
        (tf.zeros([4], tf.int64), "a dense tensor of shape (4,)"),
        (tf.zeros([4, 2, 1, 1], tf.int64), "a dense tensor of shape (4, 2, 1, 1)"),
        (sparse([(0,)], [1], [4], tf.int64), "a SparseTensor of shape (4,), int64"),
        (tf.ragged.constant([[[[1]]]], dtype=tf.int64), "with ragged_rank 3"),
    ],
    ids=range(6),
)
def test_other_shapes_are_refused_with_what_is_accepted(inputs, came):
    with pytest.raises(ValueError, match=saying("`inputs`", "SparseTensor with dense_shape [batch * 2, max_nnz]")) as e:
        csr(inputs)
    assert came in str(e.value)


@pytest.mark.parametrize(
    "inputs",
    [
        tf.zeros([4, 2], tf.float32),
        forms(KEYS, tf.float64)["sparse cube"],
        forms(KEYS, tf.uint64)["ragged cube"],
    ],
    ids=range(3),
)
def test_other_dtypes_are_refused(inputs):
    with pytest.raises(ValueError, match="table 'inputs': keys must be int64, .* Received: (float32|float64|uint64)"):
        csr(inputs)


def test_weights_must_have_the_form_of_the_ids():
    with pytest.raises(ValueError, match=saying("`weights`", "form of `inputs`", "Received: inputs a RaggedTensor")):
        csr(forms(KEYS, tf.int64)["ragged cube"], weights=tf.constant(WEIGHTS))
    with pytest.raises(ValueError, match=saying("`weights`", "form of `inputs`")):
        csr(tf.zeros([1, 2], tf.int64), weights=forms(WEIGHTS, tf.float32)["sparse cube"])

    with pytest.raises(ValueError, match=saying("`weights`", "inputs a dense tensor of shape (1, 2)", "shape (2,)")):
        csr(tf.zeros([1, 2], tf.int64), weights=[1.0, 2.0])
    cube = forms(KEYS, tf.int64)["ragged cube"]
    with pytest.raises(ValueError, match=saying("`weights`", "form of `inputs`")):
        csr(cube, weights=cube.values.with_values(tf.constant(WEIGHTS)))


ELSEWHERE = {
    "sparse, other places": (
        sparse([(0, 0), (1, 0)], [5, 6], [2, 3], tf.int64),
        sparse([(0, 0), (1, 1)], [1, 2], [2, 3], tf.float32),
    ),
    "sparse, other order": (
        sparse([(0, 0), (1, 0)], [5, 6], [2, 3], tf.int64),
        sparse([(1, 0), (0, 0)], [1, 2], [2, 3], tf.float32),
    ),
    "sparse, other shape": (
        sparse([(0, 0), (1, 0)], [5, 6], [2, 3], tf.int64),
        sparse([(0, 0), (1, 0)], [1, 2], [4, 3], tf.float32),
    ),
    "sparse, other rank": (
        sparse([(0, 0), (1, 0)], [5, 6], [2, 3], tf.int64),
        sparse([(0, 0, 0), (0, 1, 0)], [1, 2], [1, 2, 3], tf.float32),
    ),
    "sparse, too few": (
        sparse([(0, 0), (1, 0)], [5, 6], [2, 3], tf.int64),
        sparse([(0, 0)], [1], [2, 3], tf.float32),
    ),
    "ragged, other rows": (
        tf.ragged.constant([[5, 6], []], dtype=tf.int64),
        tf.ragged.constant([[1.0], [2.0]]),
    ),
    "ragged, too many": (
        tf.ragged.constant([[5, 6], []], dtype=tf.int64),
        tf.ragged.constant([[1.0, 1.0], [2.0]]),
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_weights_elsewhere_than_the_ids_are_raised_by_the_lookup(case, call):
    inputs, weights = ELSEWHERE[case]
    v = EmbeddingVariable(2, 10, name="judge")
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("one weight for each id")):
        call(lambda i, w: lookup_pooled(v, csr(i, weights=w), "sum", slot_num=2), inputs, weights)
    assert int(v.size()) == 0


@pytest.mark.parametrize("padding_key", [None, 0])
def test_dense_weights_of_unknown_shape_are_compared_when_it_runs(padding_key):
    v = EmbeddingVariable(2, 10, name="judge")
    specs = [tf.TensorSpec([None, None], dtype) for dtype in (tf.int64, tf.float32)]

    @tf.function(input_signature=specs)
    def read(ids, weights):
        return lookup_pooled(v, csr(ids, 1, weights=weights, padding_key=padding_key), "sum")

    assert read([[1, 0], [0, 2]], tf.ones([2, 2])).shape == [2, 2]
    for shape in ([4, 1], [1, 4], [2, 1], [2, 3], [0, 0]):
        with pytest.raises(tf.errors.InvalidArgumentError, match=saying("one weight for each id")):
            read([[1, 0], [0, 2]], tf.ones(shape))


def test_equal_weights_of_other_tensors_are_as_good():
    ragged, weights = forms(KEYS, tf.int64)["ragged cube"], forms(WEIGHTS, tf.float32)["ragged, int32 splits"]
    assert_csr(csr(ragged, weights=weights), KEYS, SPLITS, WEIGHTS)


BAD_WHEN_IT_RUNS = {
    "row beyond the shape": (
        sparse([(0, 0), (6, 0)], [1, 2], [6, 3], tf.int64),
        "key number 1 is outside",
    ),
    "negative row": (sparse([(-1, 0)], [1], [6, 3], tf.int64), "key number 0 is outside"),
    "feature beyond slot_num": (sparse([(0, 2, 0)], [1], [3, 2, 3], tf.int64), "key number 0 is outside"),
    "negative feature": (sparse([(1, -1, 0)], [1], [3, 2, 3], tf.int64), "key number 0 is outside"),
    "half a sample": (sparse([(0, 0)], [1], [5, 3], tf.int64), "multiple of 2. Received: 5"),
    "three features": (sparse([(0, 0, 0)], [1], [3, 3, 3], tf.int64), "slot_num = 2 features. Received: 3"),
    "ragged, half a sample": (tf.ragged.constant([[1], [2], [3]], dtype=tf.int64), "multiple of 2. Received: 3"),
    "ragged, features differ": (tf.ragged.constant([[[1], [2]], [[3]]], dtype=tf.int64), "2 features. Received: 1"),
}


@pytest.mark.parametrize("case", BAD_WHEN_IT_RUNS)
def test_what_is_found_when_it_runs_is_raised_by_the_lookup(case, call):
    inputs, text = BAD_WHEN_IT_RUNS[case]
    v = EmbeddingVariable(2, 10, name="judge")
    with pytest.raises(tf.errors.InvalidArgumentError, match=text) as error:
        call(lambda i: lookup_pooled(v, csr(i), "sum", slot_num=2), inputs)
    assert v.table_name in str(error.value)
    assert int(v.size()) == 0


def test_wrong_number_of_features_of_unknown_shape_is_raised_by_the_lookup():
    v = EmbeddingVariable(2, 10)
    spec = tf.TensorSpec([None, None], tf.int64)
    read = tf.function(lambda i: lookup_pooled(v, csr(i), "sum", slot_num=2), input_signature=[spec])
    assert read(tf.zeros([3, 2], tf.int64)).shape == [6, 2]
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("slot_num = 2 features", "Received: 3")):
        read(tf.zeros([4, 3], tf.int64))


class TestToDense:
    def test_full_sparse_and_ragged_tensors(self, rng):
        ids = tf.constant(rng.integers(0, 9, [3, 2, 2]))
        shuffled = tf.sparse.from_dense(ids + 1)
        order = rng.permutation(12)
        shuffled = tf.SparseTensor(
            tf.gather(shuffled.indices, order), tf.gather(shuffled.values, order) - 1, shuffled.dense_shape
        )
        for form in (shuffled, tf.RaggedTensor.from_tensor(ids, ragged_rank=2), tf.RaggedTensor.from_tensor(ids)):
            dense, report = to_dense(form, tf.int64, "doc")
            np.testing.assert_array_equal(dense, ids)
            assert report.shape == [0]
        dense, report = to_dense([[1, 2]], tf.uint32, "doc")
        assert (dense.dtype, report) == (tf.uint32, None)

    @pytest.mark.parametrize("form", ["sparse cube", "ragged cube"])
    def test_gaps_are_reported(self, form):
        _, report = to_dense(forms(KEYS, tf.int64)[form], tf.int64, "doc")
        assert report.numpy()[0] < 0

    @pytest.mark.parametrize(
        "places",
        [
            [(0, 0), (0, 1), (1, 0), (1, 0)],
            [(0, 0), (0, 1), (1, 0), (0, 3)],  # (1, 1) by another name
            [(0, 0), (0, 1), (1, 0), (2, 0)],
            [(0, 0), (0, 1), (1, 0), (-1, 3)],
            [(0, 0), (0, 1), (1, 0)],
            [(0, 0), (0, 1), (1, 0), (1, 1), (1, 1)],
        ],
    )
    def test_a_sparse_tensor_has_one_id_at_every_place(self, places, call):
        inputs = sparse(places, range(len(places)), [2, 2], tf.int64)
        dense, report = call(lambda i: to_dense(i, tf.int64, "doc"), inputs)
        assert report.numpy()[0] < 0 and dense.shape == [2, 2]
        layer = All2AllDenseEmbedding(10, 4, slot_num=2, nnz_per_slot=1)
        with pytest.raises(tf.errors.InvalidArgumentError, match=saying("every feature", "same number of ids")):
            call(layer, inputs)
