"""What may be a key, and what is refused rather than changed."""

import numpy as np
import pytest
import tensorflow as tf

from sok.table.keys import KEY_DTYPES, as_keys, check_key_dtype
from tests.messages import saying
from tests.reference.keys import extreme_keys


@pytest.mark.parametrize("given, expected", [(None, tf.int64), ("uint32", tf.uint32), (tf.int32, tf.int32)])
def test_key_dtype_is_a_dtype_or_its_name(given, expected):
    assert check_key_dtype(given) == expected


@pytest.mark.parametrize("given", ["float32", tf.int8, "words", 7])
def test_other_key_dtypes_are_refused(given):
    with pytest.raises(ValueError, match=saying("`key_dtype`", "int64", "int32", "uint32", "uint64")):
        check_key_dtype(given)


@pytest.mark.parametrize("dtype", KEY_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("form", ["array", "python", "tensor"])
def test_every_value_of_the_dtype_passes(dtype, form):
    values = extreme_keys(dtype.as_numpy_dtype)
    given = {"array": values, "python": [int(v) for v in values], "tensor": tf.constant(values)}[form]
    keys = as_keys(given, dtype, "t")
    assert keys.dtype == dtype
    np.testing.assert_array_equal(keys.numpy(), values)


def test_numpy_keys_pass_if_their_values_fit():
    assert as_keys(np.array([[1, 2]], np.int64), tf.uint32, "t").numpy().tolist() == [[1, 2]]
    assert as_keys(np.zeros([0, 3]), tf.int32, "t").shape == [0, 3]  # an empty array has no values to lose


@pytest.mark.parametrize(
    "dtype, keys, came",
    [
        (tf.uint32, np.array([0, -1]), "Received: -1"),
        (tf.int32, np.array([2**31]), "Received: 2147483648"),
        (tf.int64, np.array([2**63], np.uint64), "Received: 9223372036854775808"),
        (tf.uint64, [3, -5], "Received: -5"),
        (tf.int64, [1.5], "Received: an array of float64"),
        (tf.int64, np.array([True]), "Received: an array of bool"),
    ],
)
def test_values_that_do_not_fit_are_named(dtype, keys, came):
    with pytest.raises(ValueError, match=saying("table 'doc'", "keys")) as error:
        as_keys(keys, dtype, "doc")
    assert came in str(error.value)


@pytest.mark.parametrize("narrow, wide", [(tf.int32, tf.int64), (tf.uint32, tf.int64), (tf.uint32, tf.uint64)])
def test_tensors_of_a_narrower_dtype_are_cast(narrow, wide):
    values = extreme_keys(narrow.as_numpy_dtype)
    keys = as_keys(tf.constant(values), wide, "t")
    assert keys.dtype == wide
    assert keys.numpy().tolist() == values.tolist()


@pytest.mark.parametrize("given, table", [(tf.int64, tf.int32), (tf.int32, tf.uint32), (tf.float32, tf.int64)])
def test_tensors_whose_values_might_be_lost_are_refused(given, table):
    with pytest.raises(ValueError, match=f"keys must be {table.name}, .* Received: {given.name}"):
        as_keys(tf.zeros([2], given), table, "t")


@pytest.mark.parametrize(
    "given", [["a", "b"], "a", np.array(["a"]), np.array([b"a"], object), tf.constant(["a"]), ["a", 1]], ids=repr
)
def test_strings_are_refused_with_what_makes_keys_of_them(given):
    with pytest.raises(ValueError, match=saying("table 'doc'", "strings", "sok.data.hash_columns", "hash_bucket_fast")):
        as_keys(given, tf.int64, "doc")
