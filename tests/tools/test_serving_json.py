"""JSON of `sok serve`: what goes in as a tensor, and comes out as one, is the same to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sok.tools.serving.answers import answer_of
from sok.tools.serving.refusal import Refused
from sok.tools.serving.tensors import Asked, asked_in, tensors_of

DTYPES = (np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64, np.bool_, np.float16, np.float32, np.float64)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4))
)


@settings(max_examples=200, deadline=None)
@given(array=ARRAYS, rows=st.booleans())
def test_a_tensor_that_was_answered_can_be_asked_with(array, rows):
    told = json.loads(answer_of({"x": array}, rows))["predictions" if rows else "outputs"]
    body = json.dumps({"instances": told} if rows else {"inputs": {"x": told}}).encode()
    spec = tf.TensorSpec([None] * array.ndim, tf.as_dtype(array.dtype))
    again = tensors_of(asked_in(body), {"x": spec})["x"]
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.binary(max_size=8), min_size=1, max_size=5), name=st.sampled_from(["x", "x_bytes"]))
def test_so_are_strings_of_any_bytes(texts, name):
    told = json.loads(answer_of({name: np.array(texts, object)}, rows=True))["predictions"]
    again = tensors_of(Asked("", True, told), {name: tf.TensorSpec([None], tf.string)})[name]
    assert again.tolist() == texts


NESTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "b64", "y"]), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(told=NESTS, way=st.sampled_from(["instances", "inputs"]), dtype=st.sampled_from([*DTYPES, object]))
def test_whatever_else_comes_is_refused_with_words_or_is_a_tensor(told, way, dtype):
    spec = tf.TensorSpec(None, tf.string if dtype is object else tf.as_dtype(dtype))
    try:
        found = tensors_of(asked_in(json.dumps({way: told}).encode()), {"x": spec})
    except Refused as refused:
        assert refused.status == 400 and str(refused)
    else:
        assert set(found) == {"x"} and found["x"].dtype == dtype


def test_types_that_json_has_not_are_refused():
    spec = {"x": tf.TensorSpec([None], tf.complex64)}
    with pytest.raises(Refused, match="Input 'x' is complex64, which has no form in JSON") as refused:
        tensors_of(Asked("", True, [1]), spec)
    assert refused.value.status == 501
    with pytest.raises(Refused, match="Output 'x' is complex64, which has no form in JSON"):
        answer_of({"x": np.zeros(1, np.complex64)}, rows=False)


def test_narrow_floats_must_hold_what_they_are_given():
    for dtype, number in ((tf.float16, 70000.0), (tf.float16, 2049), (tf.bfloat16, 257), (tf.float64, 2**53 + 1)):
        with pytest.raises(Refused, match=f"must be {dtype.name}. Received: {number}, which would not be exact"):
            tensors_of(Asked("", True, [number]), {"x": tf.TensorSpec([None], dtype)})
        assert tensors_of(Asked("", True, [256]), {"x": tf.TensorSpec([None], dtype)})["x"] == [256]


def test_the_command_line_loads_neither_the_server_nor_tensorflow():
    code = (
        "import sys; from sok.tools import cli; cli.build_parser(); print({'aiohttp', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
