"""Each worker's part of a dataset, and keys of several columns."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.job.data import parts_of
from tests.messages import saying


def read(dataset):
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(0, 40),
    size=st.integers(1, 4),
    per_worker=st.integers(1, 4),
    drop=st.booleans(),
    is_known=st.booleans(),
)
def test_workers_together_see_the_batches_of_one(samples, size, per_worker, drop, is_known):
    dataset = tf.data.Dataset.range(samples)
    if not is_known:
        dataset = dataset.filter(lambda x: True)
    batch = size * per_worker
    parts = [read(parts_of(dataset, batch, drop, rank, size)) for rank in range(size)]
    expected = [list(range(at, min(at + batch, samples))) for at in range(0, samples, batch)]
    expected = [part for part in expected if len(part) == batch or (not drop and len(part) >= size)]
    assert {len(part) for part in parts} == {len(expected)}
    assert [sum(of_workers, []) for of_workers in zip(*parts, strict=True)] == expected
    for of_workers in zip(*parts, strict=True):
        sizes = [len(part) for part in of_workers]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    if is_known:
        assert int(parts_of(dataset, batch, drop, 0, size).cardinality()) == len(expected)


def test_parts_keep_the_structure_of_samples():
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 3], [0, 4]])
    dataset = tf.data.Dataset.from_tensor_slices(({"a": tf.range(4), "r": ragged, "s": sparse}, tf.range(4) * 10))
    ((features, labels),) = list(parts_of(dataset, 4, True, 1, 2))
    assert features["a"].numpy().tolist() == [2, 3] and labels.numpy().tolist() == [20, 30]
    assert features["r"].to_list() == [[], [4]]
    assert tf.sparse.to_dense(features["s"]).numpy().tolist() == [[3, 3], [0, 4]]


@pytest.mark.parametrize("batch", [0, -2, 1.5, True, "8"])
def test_a_batch_size_is_a_positive_whole_number(batch):
    with pytest.raises(ValueError, match=saying("`global_batch_size`", repr(batch))):
        sok.data.batches(tf.data.Dataset.range(3), batch)


def test_the_batch_size_may_be_that_of_init():
    sok.shutdown()
    with pytest.raises(ValueError, match=saying("`global_batch_size`", "sok.Init")):
        sok.data.batches(tf.data.Dataset.range(3))
    sok.Init(global_batch_size=2)
    assert read(sok.data.batches(tf.data.Dataset.range(5))) == [[0, 1], [2, 3]]
    sok.shutdown()


def columns_of(form, values):
    """values [B, F] as themselves, as [B, F, 1], and ragged."""
    if form == "ragged":
        return tf.RaggedTensor.from_tensor(np.asarray(values)[:, :, None], ragged_rank=2)
    return np.asarray(values) if form == "one id" else np.asarray(values)[:, :, None]


def values_of(tensor):
    flat = tensor.flat_values if isinstance(tensor, tf.RaggedTensor) else tensor
    return flat.numpy().reshape(-1).tolist()


@pytest.mark.parametrize("form", ["one id", "many ids", "ragged"])
def test_offsets_give_each_column_a_range(form):
    keys = sok.data.add_offsets(columns_of(form, [[0, 0, 0], [2, 0, 6]]), [3, 1, 7])
    assert keys.dtype == tf.int64 and values_of(keys) == [0, 3, 4, 2, 3, 10]


def test_offsets_of_ragged_columns():
    ids = tf.ragged.constant([[[0, 2], [], [6]], [[], [0], [1, 1]]], dtype=tf.int32)
    assert sok.data.add_offsets(ids, [3, 1, 7]).to_list() == [[[0, 2], [], [10]], [[], [3], [5, 5]]]
    assert sok.data.add_offsets(tf.zeros([0, 3], tf.int32), [3, 1, 7]).shape == (0, 3)


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_id_outside_its_column_is_named(bad):
    ids = [[0, 1], [2, bad]]
    data = tf.data.Dataset.from_tensors(ids).map(lambda ids: sok.data.add_offsets(ids, [3, 3]))
    words = saying("`ids`", "[column, size, id]", f"[1 3 {bad}]")
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        list(data)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        sok.data.add_offsets(ids, [3, 3])


@pytest.mark.parametrize("sizes", [[], [3, 0], [1.5, 2], 3, [[3]]])
def test_sizes_are_positive_whole_numbers(sizes):
    with pytest.raises(ValueError, match=saying("`sizes`", repr(sizes))):
        sok.data.add_offsets([[0, 0]], sizes)


@pytest.mark.parametrize("shape", [[4], [2, 3], [2, 2, 2, 2]])
def test_ids_have_a_column_for_each_size(shape):
    with pytest.raises(ValueError, match=saying("[B, 2]", "shape")):
        sok.data.add_offsets(tf.zeros(shape, tf.int64), [3, 3])


@pytest.mark.parametrize("form", ["one id", "many ids", "ragged"])
@pytest.mark.parametrize("kind", [str, int])
def test_hashes_are_of_column_and_value(form, kind):
    values = [[7, 7, 8], [8, 9, 7]]
    given = np.asarray(values).astype(kind) if kind is int else np.asarray(values).astype(bytes)
    keys = np.reshape(values_of(sok.data.hash_columns(columns_of(form, given), ["a", "b", "1:c"])), [2, 3])
    assert len(set(keys.flat)) == 6 and keys.min() >= 0
    swapped = sok.data.hash_columns(given[:, [1, 0]], ["b", "a"]).numpy()
    np.testing.assert_array_equal(swapped, keys[:, [1, 0]])
    # Files hold such keys: they never change.
    assert keys[0].tolist() == HASHES


HASHES = [3169956761108885374, 8198725370805643614, 5066429158880202865]


def test_no_name_and_value_read_like_another_pair():
    keys = sok.data.hash_columns([["x", "b:x", "y"]], ["a:b", "a", "c"]).numpy()[0]
    assert len(set(keys)) == 3


def test_what_cannot_be_hashed_is_refused():
    with pytest.raises(TypeError, match=saying("`values`", "float32")):
        sok.data.hash_columns([[1.5]], ["a"])
    with pytest.raises(ValueError, match=saying("`names`", "'a', 'a'")):
        sok.data.hash_columns([[1, 2]], ["a", "a"])
