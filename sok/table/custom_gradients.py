"""Tables that TensorFlow itself reads: in `tf.custom_gradient`, and by `tf.gather`."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok.base import _ops

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable


def stand_in(table: EmbeddingVariable) -> tf.Tensor | None:
    """What stands for `table` where TensorFlow records the inputs of a custom gradient; None where it does not.

    TensorFlow reads there each variable that the function has watched. What comes back as gradient of the tensor is
    taken for that of the variable. So a table reads as the rows of no keys, [0, D], whose gradient is handed on.
    """
    if not _is_recorded({kind.__module__ for kind in type(table).__mro__}):
        return None
    resource_variable_ops.variable_accessed(table)
    if table.on_servers is not None:  # whose handle is such rows
        return tf.identity(table.handle)
    rows, _ = _ops.lib().sok_table_lookup(table.handle, tf.zeros([0], table.key_dtype), False, dim=table.local_dim)
    return rows


def gathers() -> bool:
    """Whether `tf.gather`, which `tf.nn.embedding_lookup` calls, has called the method that asks."""
    return bool(sys._getframe(2).f_globals.get("__name__") == "tensorflow.python.ops.array_ops")


def _is_recorded(modules: set[str]) -> bool:
    # The function of the user is called from there, too. Then frames of another module are in between.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "tensorflow.python.ops.custom_gradient":
            return True
        if not module.startswith("tensorflow.") and module not in modules:
            return False
        frame = frame.f_back
    return False
