"""What layers say of inputs that are none, under `tf.keras`, whichever Keras that is: see keras_checks.py."""

from __future__ import annotations

import pytest
import tensorflow as tf

import sok
from tests.messages import saying
from tests.sok.keras_checks import IDS, IS_KERAS_3, Subclassed, embedding

keras = tf.keras


@pytest.mark.parametrize("start", ["input", "sequential", "array"])
def check_floating_point_ids_are_refused(start):
    layer = embedding()
    with pytest.raises(ValueError, match="`inputs` must be integers. Received: float32.*dtype='int64'"):
        if start == "input":
            layer(keras.Input((2,)))  # Keras' default dtype
        elif start == "sequential":
            model = keras.Sequential([layer, keras.layers.Flatten()])
            # Keras 3 makes a Sequential model's input floating, whatever comes.
            model.predict(IDS if IS_KERAS_3 else IDS.astype("float32"), verbose=0)
        else:
            layer(tf.constant(IDS, tf.float32))


STRINGS = tf.constant([["a", "b"]])


@pytest.mark.parametrize("start", ["input", "model", "tensor", "ragged", "sparse", "array", "list"])
def check_ids_that_are_strings_are_refused_with_what_to_do(start):
    layer = embedding(name="of_strings")
    with pytest.raises(ValueError, match=saying("strings", "sok.data.hash_columns", "of_strings")):
        if start == "input":
            layer(keras.Input((2,), dtype="string"))
        elif start == "model":
            Subclassed(layer)(STRINGS)
        else:
            ragged = tf.RaggedTensor.from_tensor(STRINGS[:, :, tf.newaxis])
            forms = dict(tensor=STRINGS, ragged=ragged, sparse=tf.sparse.from_dense(STRINGS))
            layer({**forms, "array": STRINGS.numpy(), "list": [["a", "b"]]}[start])


def _input(*shape, **kwargs):
    return keras.Input(shape, dtype="int64", **kwargs)


@pytest.mark.parametrize(
    "shape, slot_num, kwargs",
    [((3,), 2, {}), ((3, 1), 2, {}), ((2, 1, 1), 2, {}), ((), 1, {}), ((3, 4), 2, {"sparse": True})],
)
@pytest.mark.filterwarnings("ignore:.*unbuilt state")  # Keras 3 looks at shapes first, and says more than the error
def check_an_input_of_the_wrong_shape_is_refused_when_the_model_is_built(shape, slot_num, kwargs):
    layer = embedding(slot_num=slot_num)
    with pytest.raises(ValueError, match=saying(f"slot_num = {slot_num}", str((None, *shape)))):
        layer(_input(*shape, **kwargs))
    if not kwargs:
        with pytest.raises(ValueError, match=f"slot_num = {slot_num}"):
            Subclassed(layer)(_input(*shape))


def check_inputs_of_fitting_or_unknown_shapes_are_built():
    for shape, slot_num, kwargs in (
        *[((2,), 2, {}), ((2, 5), 2, {}), ((None,), 2, {}), ((None, 3), 2, {}), ((7,), 1, {}), ((1, 7), 1, {})],
        *[((5,), 2, {"sparse": True}), ((2, 5), 2, {"sparse": True})],
        *([] if IS_KERAS_3 else [((None,), 2, {"ragged": True}), ((2, None), 2, {"ragged": True})]),
    ):
        assert tuple(embedding(slot_num=slot_num)(_input(*shape, **kwargs)).shape)[1:] == (slot_num, 4)
    pairs = sok.All2AllDenseEmbedding(100, 4, slot_num=2, nnz_per_slot=3)
    assert tuple(pairs(_input(2, 3)).shape) == (None, 2, 3, 4)
    for shape in ((2, 4), (3, 3), (2,), (2, 3, 1)):
        with pytest.raises(ValueError, match=saying("slot_num, nnz_per_slot", "[batch, 2, 3]", str((None, *shape)))):
            pairs(_input(*shape))
