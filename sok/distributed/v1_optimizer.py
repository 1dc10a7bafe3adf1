"""The distributed optimizer of `tf.compat.v1.train`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok.distributed import tables
from sok.distributed.reduction import Average, Pair, check_op, reduce_dense, split_pairs, table_scale


class V1DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """See `sok.DistributedOptimizer`. Slots are those of `inner`."""

    def __init__(
        self, optimizer: Any, embedding_optimizer: Any = None, op: str = Average, name: str | None = None
    ) -> None:
        super().__init__(use_locking=False, name=name or f"Distributed{optimizer.get_name()}")
        self.inner = optimizer
        self.op = check_op(op)
        self._tables = tables.TableTrainer(optimizer, embedding_optimizer, self.op, shares_iterations=False)
        # Graphs in which compute_gradients has reduced; apply_gradients does it in the others.
        self._reduced_in: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def embedding_optimizer(self) -> Any:
        """The optimizer of the tables."""
        return self._tables.optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Pair]:
        """As the inner optimizer's, of all workers together, so that clipping and summaries see those."""
        pairs = self.inner.compute_gradients(*args, **kwargs)
        self._reduced_in.add(tf.compat.v1.get_default_graph())
        _, others = split_pairs(pairs)
        reduced = iter(reduce_dense(others, self.op))
        scale = table_scale(self.op)
        results = []
        for grad, variable in pairs:
            if not split_pairs([(grad, variable)])[0]:
                results.append((next(reduced), variable))
            elif grad is None or scale == 1.0:
                results.append((grad, variable))
            else:
                results.append((tf.IndexedSlices(grad.values * scale, grad.indices), variable))
        return results

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], global_step: Any = None, name: str | None = None
    ) -> tf.Operation | None:
        """As the inner optimizer's. Reduces, unless `compute_gradients` was called in this graph and did."""
        reduces = tf.compat.v1.get_default_graph() not in self._reduced_in
        of_tables, others = split_pairs(grads_and_vars)
        reduced = reduce_dense(others, self.op) if reduces else [grad for grad, _ in others]
        has_table_step = any(grad is not None for grad, _ in of_tables)
        has_dense_step = any(grad is not None for grad in reduced)
        update = self._tables.apply(of_tables, counts_step=True, reduces=reduces)
        with tf.control_dependencies([] if update is None else [update]):
            if has_dense_step or not has_table_step:
                pairs = [(grad, variable) for grad, (_, variable) in zip(reduced, others, strict=True)]
                return self.inner.apply_gradients(pairs, global_step, name)
            if global_step is None:
                return update
            added = tf.compat.v1.assign_add(global_step, 1)
        return None if update is None else tf.group(added)

    def get_slot(self, var: Any, name: str) -> Any:
        return self.inner.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        return self.inner.get_slot_names()

    def variables(self) -> list[Any]:
        return [*self.inner.variables(), *self._tables.own_variables]
