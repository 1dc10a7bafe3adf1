"""The distributed optimizer of `tf.compat.v1.train`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from sok.base.types import StockOptimizer, Variable
from sok.distributed.reduction import Pair, reduce_dense, split_pairs, table_scale
from sok.distributed.tables import HandsOn
from sok.distributed.tape import is_reduced, mark_reduced
from sok.table.table import is_embedding_variable


class V1DistributedOptimizer(HandsOn, tf.compat.v1.train.Optimizer):
    """See `sok.DistributedOptimizer`. Slots are those of `inner`."""

    def __init__(self, optimizer: StockOptimizer, name: str | None = None, **tables: Any) -> None:
        super().__init__(use_locking=False, name=name or f"Distributed{optimizer.get_name()}")
        self._hold(optimizer, **tables, owner=self)
        self._track_trackable(optimizer, "inner")

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Pair]:
        """As the inner optimizer's, of all workers together, so that clipping and summaries see those."""
        pairs = self.inner.compute_gradients(*args, **kwargs)
        of_tables, others = split_pairs(pairs)
        reduced = iter(reduce_dense(others, self.op, of_tables))
        scale = table_scale(self.op)
        return [
            (mark_reduced(grad, scale) if is_embedding_variable(variable) else _marked(next(reduced)), variable)
            for grad, variable in pairs
        ]

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation | None:
        """As the inner optimizer's. Reduces gradients, unless they come from `compute_gradients`, which has done so.

        Raises:
            ValueError: some come from `compute_gradients` and others do not.
        """
        pairs = list(grads_and_vars)
        update, result = self._tables.step(
            pairs,
            lambda others: self.inner.apply_gradients(others, global_step, name),
            lambda: None if global_step is None else tf.group(tf.compat.v1.assign_add(global_step, 1)),
            reduces=not _are_reduced([grad for grad, _ in pairs if grad is not None]),
        )
        return update if result is None else result

    def get_slot(self, var: Variable, name: str) -> Any:
        return (self.embedding_optimizer if is_embedding_variable(var) else self.inner).get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        return self.inner.get_slot_names()

    def __dir__(self) -> list[str]:
        # TensorFlow's checkpoints look here for it, and would ask for variables that are slots of tables. Those of
        # other variables they find by `inner`.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def variables(self) -> list[Any]:
        return [*self.inner.variables(), *self._tables.own_variables]


# On the ops that give reduced gradients of dense variables.
_MARK = "_sok_is_reduced"


def _marked(grad: Any) -> Any:
    """The dense gradient of all workers, in a graph so that what is made of it can be told by it."""
    if grad is None or tf.executing_eagerly():
        return grad
    if isinstance(grad, tf.IndexedSlices):  # of one worker
        return tf.IndexedSlices(_marked(grad.values), grad.indices, grad.dense_shape)
    marked = tf.identity(grad)
    marked.op._set_attr(_MARK, attr_value_pb2.AttrValue(b=True))
    return marked


def _are_reduced(grads: list[Any]) -> bool:
    """Whether gradients are, or are made of, what `compute_gradients` gave: clipped, say."""
    if tf.executing_eagerly():
        return False  # there gradients come from tapes
    without: set[str] = set()
    answers = {is_reduced(grad) or _depends_on_mark(grad, without) for grad in grads}
    if len(answers) > 1:
        raise ValueError(
            "Some of `grads_and_vars` come from compute_gradients(), which has reduced them over all workers, and "
            "others do not. Give them in two calls of apply_gradients()."
        )
    return answers == {True}


def _depends_on_mark(grad: Any, without: set[str]) -> bool:
    """Whether a tensor is computed from a marked op. without: ops that are known not to be; more are added."""
    waiting = [(grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)).op]
    seen: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name in seen or op.name in without:
            continue
        if _MARK in op.node_def.attr:
            return True
        seen.add(op.name)
        waiting += [tensor.op for tensor in op.inputs]
    without |= seen
    return False
