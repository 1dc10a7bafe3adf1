"""What is noted when a table is looked up, so that it is trained."""

from __future__ import annotations

from typing import Any

from tensorflow.python.ops import resource_variable_ops

from sok.base import keras_calls


def note(table: Any) -> None:
    """To be called for each table of a lookup, before it."""
    keras_calls.track(table)
    # Without it a tape does not know that the handle stands for this variable and its gradient is silently None.
    resource_variable_ops.variable_accessed(table)
