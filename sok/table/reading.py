"""What is noted when a table is looked up, so that it is trained, or somebody says that it is not."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from sok.base import keras_calls

# Who sums up the gradients of several batches applies them before: 32 tapes without any update are no training.
_TAPES = 32
# What optimizers change variables with. Metrics count with others.
_UPDATES = ("ResourceApply", "ResourceSparseApply", "AssignSubVariableOp", "Sok>GroupApply")


def note(table: Any, insert: tf.Tensor | None = None) -> None:
    """To be called for each table of a lookup, before it. `insert`: whether it makes rows, as in training; None: no."""
    keras_calls.track(table)
    asks = insert is not None and table.trainable and not is_trained(table) and _could_train(table, insert)
    is_new = asks and not record.should_record_backprop([table.handle])
    # Without it a tape does not know that the handle stands for this variable and its gradient is silently None.
    resource_variable_ops.variable_accessed(table)
    if asks:
        _expect_training(table, is_new)


def is_trained(table: Any) -> bool:
    """Whether an optimizer has been built for the table, or has updated it."""
    return bool(vars(table).get("_optimizers"))


def note_written(table: Any) -> None:
    """To be called where rows are stored: who does so in a loop may train by it."""
    vars(table).pop("_tapes", None)


def _could_train(table: Any, insert: tf.Tensor) -> bool:
    if vars(table).get("_is_told_untrained") or not record.could_possibly_record():
        return False
    known = tf.get_static_value(insert)
    return (known is None or bool(known)) and tf.compat.v1.executing_eagerly_outside_functions()


def _expect_training(table: Any, is_new: bool) -> None:
    """Says so once if a training step looks the table up and leaves it as it is. is_new: for this tape, if eager."""
    model = keras_calls.model_that_trains()
    if model is not None:
        if not any(variable is table for variable in model.variables):
            _tell(
                table,
                f"fit of model '{model.name}', and is not among the model's variables, so it is not trained. Keep the "
                "layer or table in an attribute of the model or of one of its layers (itself, or in a list or dict)",
            )
        return
    if not record.should_record_backprop([table.handle]):
        return
    if not tf.executing_eagerly():
        _expect_at_end(table, tf.compat.v1.get_default_graph())
    elif is_new:
        tapes = vars(table)["_tapes"] = vars(table).get("_tapes", 0) + 1
        if tapes == _TAPES:
            _tell(table, f"{tapes} tapes, and no optimizer has trained it. {_REMEDY}")


def _expect_at_end(table: Any, graph: Any) -> None:
    """Looks, when the functions that are being traced end, whether one does an optimizer's step without the table."""
    watched = vars(table).setdefault("_watched_graphs", weakref.WeakSet())
    while graph is not None and hasattr(graph, "outer_graph"):
        if graph not in watched and getattr(graph, "_scope_exit_callbacks", None) is not None:
            watched.add(graph)
            graph._add_scope_exit_callback(lambda graph=graph: _judge(table, graph))
        graph = graph.outer_graph


def _judge(table: Any, graph: Any) -> None:
    is_outside = record.should_record_backprop([table.handle])  # of a tape that goes on
    if is_outside or is_trained(table) or vars(table).get("_is_told_untrained"):
        return
    if any(op.type.startswith(_UPDATES) for op in graph.get_operations()):
        _tell(table, f"function '{graph.name}', whose optimizer step leaves it as it is. {_REMEDY}")


_REMEDY = (
    "Ask the tape for its gradient and apply it: it belongs among the variables that you give to tape.gradient and "
    "apply_gradients, of sok.DistributedOptimizer, sok.OptimizerWrapper or one of sok.optimizers"
)


def _tell(table: Any, where: str) -> None:
    vars(table)["_is_told_untrained"] = True
    warnings.warn(
        f"Embedding table '{table.table_name}' is looked up for training in {where}. If it is to stay as it is, make "
        "it with trainable=False, or look it up with training=False.",
        stacklevel=2,
    )
