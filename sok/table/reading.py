"""What is noted when a table is looked up, so that it is trained, or somebody says that it is not."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from sok.base import keras_calls

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable

# Who sums up the gradients of several batches applies them before: 32 tapes without any update are no training.
_TAPES = 32
# What optimizers change variables with. Metrics count with others.
_UPDATES = ("ResourceApply", "ResourceSparseApply", "AssignSubVariableOp", "Apply", "SparseApply", "Sok>GroupApply")


@dataclasses.dataclass(eq=False)
class _Training:
    """What is known of the training of a table. It outlives the table: the end of the program asks for it."""

    table_name: str
    is_done: bool = False  # an optimizer has been built for the table, or has updated it
    is_told: bool = False
    tapes: int = 0  # in eager mode, since rows were stored
    watched: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)  # functions, until they end
    graph: weakref.ref[Any] | None = None  # of TF 1, in which it was looked up

    def tell(self, where: str) -> None:
        """Says once that nobody trains the table."""
        if self.is_done or self.is_told:
            return
        self.is_told = True
        _awaited.pop(id(self), None)
        warnings.warn(
            f"Embedding table '{self.table_name}' is looked up for training {where}. If it is to stay as it is, make "
            "it with trainable=False, or look it up with training=False.",
            stacklevel=2,
        )


# Those that tapes or v1 graphs have looked up. Most are trained soon after; the rest are told of when rows are kept.
_awaited: dict[int, _Training] = {}


def note(table: EmbeddingVariable, insert: tf.Tensor | None = None) -> None:
    """To be called for each table of a lookup, before it. `insert`: whether it makes rows, as in training; None: no."""
    keras_calls.track(table)
    asks = insert is not None and table.trainable and _could_train(table, insert)
    is_new = asks and not record.should_record_backprop([table.handle])
    # Without it a tape does not know that the handle stands for this variable and its gradient is silently None.
    resource_variable_ops.variable_accessed(table)
    if asks:
        _expect_training(table, is_new)


def note_trained(table: EmbeddingVariable) -> None:
    """To be called by an optimizer that has been built for the table, or updates it."""
    training = _of(table)
    training.is_done = True
    _awaited.pop(id(training), None)


def note_written(table: EmbeddingVariable) -> None:
    """To be called where rows are stored: who does so in a loop may train by it."""
    _of(table).tapes = 0
    _awaited.pop(id(_of(table)), None)


def tell_untrained(tables: Iterable[Any]) -> None:
    """Says which of these tables training has looked up and left as they are. To be called where rows are kept.

    For steps that Python does not see: those of a v1 session, of a function inside an eager tape, and of a function
    that gives gradients to somebody who may or may not apply them.
    """
    _tell_all(_of(table) for table in tables)


@atexit.register
def _tell_at_exit() -> None:
    if not hasattr(sys, "last_value"):  # a program that failed had no time to train
        _tell_all(list(_awaited.values()))


def _tell_all(found: Iterable[_Training]) -> None:
    for training in [training for training in found if id(training) in _awaited]:
        graph = training.graph and training.graph()
        if training.graph is None:
            training.tell(f"by tapes, and no optimizer has trained it until now. {_REMEDY}")
        elif graph is not None and _has_update(graph):
            training.tell(f"in a graph whose optimizers leave it as it is. {_REMEDY}")


def _of(table: Any) -> _Training:
    found: _Training | None = vars(table).get("_training")
    if found is None:
        found = vars(table)["_training"] = _Training(table.table_name)
    return found


def _could_train(table: Any, insert: tf.Tensor) -> bool:
    if _of(table).is_done or _of(table).is_told:
        return False
    known = tf.get_static_value(insert)
    is_v1 = not tf.compat.v1.executing_eagerly_outside_functions()
    return (known is None or bool(known)) and (is_v1 or record.could_possibly_record())


def _expect_training(table: Any, is_new: bool) -> None:
    """Says so once if a training step looks the table up and leaves it as it is. is_new: for this tape, if eager."""
    training, model = _of(table), keras_calls.model_that_trains()
    if model is not None:
        if not any(variable is table for variable in model.variables):
            training.tell(
                f"in fit of model '{model.name}', and is not among the model's variables, so it is not trained. Keep "
                "the layer or table in an attribute of the model or of one of its layers (itself, or in a list or dict)"
            )
        return
    if not tf.compat.v1.executing_eagerly_outside_functions():
        training.graph = weakref.ref(_outermost(tf.compat.v1.get_default_graph()))
    elif not record.should_record_backprop([table.handle]):
        return
    _awaited[id(training)] = training
    if training.graph is not None:
        return
    if not tf.executing_eagerly():
        _expect_at_end(table, tf.compat.v1.get_default_graph())
    elif is_new:
        training.tapes += 1
        if training.tapes == _TAPES:
            training.tell(f"in {_TAPES} tapes, and no optimizer has trained it. {_REMEDY}")


def _outermost(graph: Any) -> Any:
    return _outermost(graph.outer_graph) if getattr(graph, "outer_graph", None) is not None else graph


def _expect_at_end(table: Any, graph: Any) -> None:
    """Looks, when the functions that are being traced end, whether one does an optimizer's step without the table."""
    watched = _of(table).watched
    while graph is not None and hasattr(graph, "outer_graph"):
        if graph not in watched and getattr(graph, "_scope_exit_callbacks", None) is not None:
            watched.add(graph)
            graph._add_scope_exit_callback(lambda graph=graph: _judge(table, graph))
        graph = graph.outer_graph


def _judge(table: Any, graph: Any) -> None:
    if _of(table).is_done or _of(table).is_told:
        return  # before all operations are looked through: that of each of many tables takes longer than the trace
    is_outside = record.should_record_backprop([table.handle])  # of a tape that goes on
    if not is_outside and _has_update(graph):
        _of(table).tell(f"in function '{graph.name}', whose optimizer step leaves it as it is. {_REMEDY}")


def _has_update(graph: Any) -> bool:
    return any(op.type.startswith(_UPDATES) for op in graph.get_operations())


_REMEDY = (
    "Ask for its gradient and apply it: it belongs among the variables that you give to tape.gradient (tf.gradients) "
    "and apply_gradients, of sok.DistributedOptimizer, sok.OptimizerWrapper or one of sok.optimizers"
)
