"""A hint where equal ids of several slots share a row, and nobody has said that they are to."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops, keras_calls
from sok.job import context
from sok.job.transport import ordering

_BATCHES = 3  # so many are looked at
_SAMPLES = 32, 512  # of a batch: fewer say nothing, and more of them nothing else


class SharedSlots:
    """Looks at the first training batches of a layer with several slots, and warns once.

    Args:
        layer: its name.
        slot_num: how many slots it has.
    """

    def __init__(self, layer: str, slot_num: int) -> None:
        self._layer, self._slot_num = layer, slot_num
        self._batches = 0

    def look(self, keys: tf.Tensor, row_splits: tf.Tensor, inserts: Any) -> None:
        """To be called with the ids of each batch: segment b * slot_num + f is slot f of sample b.

        Eagerly, and while a function is traced for Keras' `fit`, which then runs four small ops more in each step.
        Scripts for SOK, where slots share rows on purpose, hear nothing.
        """
        is_over = self._batches >= _BATCHES or context.rank() != 0 or "sparse_operation_kit" in sys.modules
        if is_over or (not tf.is_tensor(inserts) and not inserts):
            return
        if tf.executing_eagerly():
            self._judge(keys.numpy(), row_splits.numpy())
        elif "train_step" in keras_calls.running() and not _ops.is_substituted():
            with tf.device("/CPU:0"):
                seen = ordering.counter(f"sok/slots/{id(self)}")
                tf.raw_ops.AssignAddVariableOp(resource=seen, value=tf.constant(1, tf.int64))
                is_early = tf.raw_ops.ReadVariableOp(resource=seen, dtype=tf.int64) <= _BATCHES
                arguments = [tf.identity(keys), tf.identity(row_splits)]
                tf.cond(is_early, lambda: tf.numpy_function(self._judge, arguments, tf.bool), lambda: False)

    def _judge(self, keys: np.ndarray, row_splits: np.ndarray) -> np.bool_:
        self._batches += 1
        if self._batches > _BATCHES:
            return np.bool_(False)
        found = shared(keys, row_splits, self._slot_num)
        if found is not None:
            self._batches = _BATCHES
            key, slots, count = found
            warnings.warn(
                f"Layer '{self._layer}': equal ids came in {count} of {self._slot_num} slots (say id {key} in slots "
                f"{slots}), and share one row, since all slots share one table. If an id means something else in each "
                "slot, give the layer distinct_slots=True, or columns keys of their own (sok.data.hash_columns, "
                "sok.data.add_offsets). If slots are to share rows, distinct_slots=False says so, and ends this hint.",
                stacklevel=2,
            )
        return np.bool_(True)


def shared(keys: np.ndarray, row_splits: np.ndarray, slot_num: int) -> tuple[int, list[int], int] | None:
    """What says that slots share ids: an id, two of its slots, and how many slots have such ids.

    None unless half of the slots do, by two ids at least: one may be padding.
    """
    samples = (len(row_splits) - 1) // slot_num
    if samples < _SAMPLES[0] or row_splits[-1] != len(keys):  # what is wrong with an input, the lookup will say
        return None
    row_splits = row_splits[: min(samples, _SAMPLES[1]) * slot_num + 1]
    slots = np.repeat(np.arange(len(row_splits) - 1) % slot_num, np.diff(row_splits))
    ids, number = np.unique(keys[: len(slots)], return_inverse=True)
    pairs = np.unique(number.ravel() * slot_num + slots)  # an id in a slot, however often
    number, slots = pairs // slot_num, pairs % slot_num
    several = np.bincount(number, minlength=len(ids)) > 1
    count = len(np.unique(slots[several[number]]))
    if several.sum() < 2 or 2 * count < slot_num:
        return None
    first = int(several.argmax())
    return int(ids[first]), slots[number == first][:2].tolist(), count
