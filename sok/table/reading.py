"""What is noted when a table is looked up, so that it is trained, or missed where it is not."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops

from sok.base import keras_calls

# By the graph that is being built, or by thread: the tables whose lookups a tape may have recorded since it was asked.
_in_graphs: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_here = threading.local()


def note(table: Any) -> None:
    """To be called for each table of a lookup, before it."""
    keras_calls.track(table)
    # Without it a tape does not know that the handle stands for this variable and its gradient is silently None.
    resource_variable_ops.variable_accessed(table)
    if table.trainable and record.could_possibly_record():
        for read in _sets():
            read.add(table)


def read_in_this_step() -> list[Any]:
    """The trainable tables that were looked up under a tape in the function that is being traced, or those around it;
    when executing eagerly, in this thread since this was asked last."""
    found = {id(table): table for read in _sets() for table in read}
    if tf.executing_eagerly():
        _here.tables = weakref.WeakSet()
    return sorted(found.values(), key=lambda table: table.table_name)


def _sets() -> list[weakref.WeakSet[Any]]:
    if tf.executing_eagerly():
        if not hasattr(_here, "tables"):
            _here.tables = weakref.WeakSet()
        return [_here.tables]
    graph, sets = ops.get_default_graph(), []
    while graph is not None and graph.building_function:
        sets.append(_in_graphs.setdefault(graph, weakref.WeakSet()))
        graph = getattr(graph, "outer_graph", None)
    return sets
