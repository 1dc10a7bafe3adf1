"""Keys: which dtypes they may have, and how what a person passes becomes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.errors import refuse_strings
from sok.base.types import DTypeLike, Shaped, TensorLike

KEY_DTYPES = (tf.int64, tf.int32, tf.uint32, tf.uint64)

# What every value of fits into.
_WIDER = {
    tf.int64: (tf.int32, tf.uint32, tf.int16, tf.uint16, tf.int8, tf.uint8),
    tf.int32: (tf.int16, tf.uint16, tf.int8, tf.uint8),
    tf.uint32: (tf.uint16, tf.uint8),
    tf.uint64: (tf.uint32, tf.uint16, tf.uint8),
}


def check_key_dtype(key_dtype: DTypeLike, argument: str = "key_dtype") -> tf.DType:
    """The key dtype meant by a tf dtype or its name; `ValueError` for others. None means int64."""
    try:
        dtype = tf.int64 if key_dtype is None else tf.as_dtype(key_dtype)
    except TypeError:
        dtype = None
    if dtype not in KEY_DTYPES:
        names = ", ".join(d.name for d in KEY_DTYPES)
        raise ValueError(f"`{argument}` must be one of {names}. Received: {key_dtype!r}.")
    return dtype


def as_keys(keys: TensorLike, key_dtype: tf.DType, table_name: str, label: str | None = None) -> tf.Tensor:
    """`keys` as a tensor of `key_dtype`.

    Tensors of another integer dtype are cast if no value of that dtype can be lost; NumPy arrays and Python numbers if
    none of these values is.

    Messages begin with `label`, by default the table's name.

    Raises:
        ValueError: a value, or the dtype, does not fit; of strings, it says how to make keys of them.
    """
    label = label or f"table '{table_name}'"
    if not (tf.is_tensor(keys) and isinstance(keys, Shaped)):
        return tf.constant(_checked_array(keys, key_dtype, label), key_dtype)
    if keys.dtype == key_dtype:
        return tf.convert_to_tensor(keys)
    if keys.dtype in _WIDER[key_dtype]:
        return tf.cast(keys, key_dtype)
    refuse_strings(keys.dtype, label)
    raise ValueError(
        f"{label}: keys must be {key_dtype.name}, or an integer dtype that fits into it. "
        f"Received: {keys.dtype.name}. Cast them, or give a table another key_dtype."
    )


def _checked_array(keys: Any, key_dtype: tf.DType, label: str) -> np.ndarray:
    # TensorFlow would wrap values that do not fit, and cut the fraction off floats, without a word.
    try:
        array = np.asarray(keys)
    except ValueError as error:
        raise ValueError(
            f"{label}: nested lists of keys must be even. For features with different numbers of ids pass "
            f"tf.ragged.constant(ids, dtype=tf.{key_dtype.name}) to the layer. ({error})"
        ) from None
    if array.size == 0:
        return np.zeros(array.shape, key_dtype.as_numpy_dtype)
    given = array.dtype
    if given.kind == "f" and not isinstance(keys, np.ndarray):
        array = np.asarray(keys, object)  # NumPy makes floats of Python integers on both sides of 2^63
    is_integer = array.dtype.kind in "iu" or array.dtype == object and all(type(k) is int for k in array.ravel())
    if not is_integer:
        refuse_strings(np.asarray(array.ravel().tolist()).dtype if given.kind == "O" else given, label)
        raise ValueError(f"{label}: keys must be integers. Received: an array of {given}.")
    for key in (int(array.min()), int(array.max())):
        if not key_dtype.min <= key <= key_dtype.max:
            raise ValueError(
                f"{label}: keys must be {key_dtype.name}, in [{key_dtype.min}, {key_dtype.max}]. Received: {key}."
            )
    return array.astype(key_dtype.as_numpy_dtype)
