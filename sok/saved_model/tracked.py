"""What a traced function needs besides tables, and what it must not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.checkpoint import trackable_view
from tensorflow.python.trackable.base import Trackable

from sok.base.types import Exportable
from sok.table.table import is_embedding_variable, table_of

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

_OURS = ("Sok>", "Horovod")
_SERVED = "Sok>Serving"  # of the library that a server loads for a native export
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def resources_of(functions: Sequence[Any], model: Exportable, known: Sequence[tf.Tensor]) -> list[Any]:
    """Variables and other resources (lookup tables, say) that functions have captured, but for `known` handles.

    Only these are saved, and not the model: it has parts that no SavedModel can hold, such as tables and optimizers.

    Raises:
        ValueError: of a resource nobody can be found who would save it.
    """
    outside = [tensor for f in functions for tensor, _ in f.graph.captures if tensor.dtype == tf.resource]
    captured = {id(tensor): tensor for tensor in outside}
    for handle in known:
        captured.pop(id(handle), None)
    found = []
    candidates = [(v.handle, v) for f in functions for v in f.graph.variables if not is_embedding_variable(v)]
    for trackable in trackable_view.TrackableView(model).descendants() if isinstance(model, Trackable) else []:
        candidates.append((getattr(trackable, "resource_handle", None), trackable))
    for handle, trackable in candidates:
        if captured.pop(id(handle), None) is not None:
            found.append(trackable)
    for tensor in captured.values():
        table = table_of(tensor)
        raise ValueError(
            f"The model gives table '{table.table_name}' as an argument to a tf.function. Let the function find it as "
            "an attribute, or in its closure, to export the model."
            if table is not None
            else f"The model uses a resource, {tensor}, that is not an attribute of the model or of one of its parts "
            "(a lookup table, say). Make it one, to export the model."
        )
    return found


def check_ops(graph_def: graph_pb2.GraphDef) -> None:
    """Looks at all nodes, also those of functions.

    Raises:
        ValueError: some are ops that a TensorFlow without us, or without this process' Python, does not have.
    """
    nodes = [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]
    ours = sorted({node.op for node in nodes if node.op.startswith(_OURS) and not node.op.startswith(_SERVED)})
    if ours:
        names = sorted(node.name for node in nodes if node.op in ours)
        raise ValueError(
            f"The model cannot be exported: it uses ops that only sok has, {', '.join(ours)} (nodes "
            f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}). Lookups of layers, groups and tables are "
            "exported; what reads, writes or counts the rows of a table by other means is not."
        )
    python = sorted(node.name for node in nodes if node.op in _PYTHON)
    if python:
        raise ValueError(
            "The model cannot be exported: it calls Python functions of this process (tf.py_function or "
            f"tf.numpy_function), in nodes {', '.join(python[:5])}."
        )
