"""A hint where equal ids of several slots share a row, and nobody has said that they are to."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from sok.base import _ops
from sok.base.types import Condition
from sok.job import context
from sok.job.transport import ordering

_BATCHES = 8  # so many are looked at, together: few ids of two large columns are in one
_SAMPLES, _KEYS = 32, 1 << 15  # of a batch: fewer say nothing, and more of them take too long


class SharedSlots:
    """Looks at the first training batches of a layer with several slots, and warns once.

    Args:
        layer: its name.
        slot_num: how many slots it has.
    """

    def __init__(self, layer: str, slot_num: int) -> None:
        self._layer, self._slot_num = layer, slot_num
        self._batches = 0
        self._seen = np.empty([0, 2], np.int64)  # distinct pairs of id and slot

    def look(self, keys: tf.Tensor, row_splits: tf.Tensor, inserts: Condition) -> None:
        """To be called with the ids of each batch: segment b * slot_num + f is slot f of sample b.

        Eagerly, and while a function with a tape is traced, which then runs four small ops more in each step.
        Scripts for SOK, where slots share rows on purpose, hear nothing.
        """
        is_over = self._batches >= _BATCHES or context.rank() != 0 or "sparse_operation_kit" in sys.modules
        if is_over or (not tf.is_tensor(inserts) and not inserts):
            return
        if tf.executing_eagerly():
            self._judge(keys.numpy(), row_splits.numpy())
        elif record.could_possibly_record() and not _ops.is_substituted():
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
        self._seen = np.unique(np.concatenate([self._seen, pairs_of(keys, row_splits, self._slot_num)]), axis=0)
        found = shared(self._seen, self._slot_num)
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
        if self._batches == _BATCHES:
            self._seen = self._seen[:0]
        return np.bool_(True)


def pairs_of(keys: np.ndarray, row_splits: np.ndarray, slot_num: int) -> np.ndarray:
    """Ids of a batch and their slots, [N, 2] int64; none of a batch that says little."""
    splits = row_splits[: np.searchsorted(row_splits, _KEYS, side="right")]
    splits = splits[: (len(splits) - 1) // slot_num * slot_num + 1]
    if len(splits) <= _SAMPLES * slot_num or row_splits[-1] != len(keys):  # what is wrong, the lookup will say
        return np.empty([0, 2], np.int64)
    slots = np.repeat(np.arange(len(splits) - 1) % slot_num, np.diff(splits))
    return np.stack([keys[: len(slots)].astype(np.int64), slots], 1)


def shared(pairs: np.ndarray, slot_num: int) -> tuple[int, list[int], int] | None:
    """What says that slots share ids: an id, two of its slots, and how many slots have such ids.

    None unless half of the slots do, by two ids at least: one may be padding.

    Args:
        pairs: [N, 2], distinct and in order: an id, and a slot that it came in.
        slot_num: how many slots there are.
    """
    ids, number, counts = np.unique(pairs[:, 0], return_inverse=True, return_counts=True)
    slots, several = pairs[:, 1], counts > 1
    count = len(np.unique(slots[several[number.ravel()]]))
    if several.sum() < 2 or 2 * count < slot_num:
        return None
    first = int(several.argmax())
    return int(ids[first]), slots[number.ravel() == first][:2].tolist(), count
