"""Optimizer state of tables under the names that SOK v2 gives it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sok.base.types import StockOptimizer
from sok.compat.formats.shard import Shard
from sok.optimizers.base import Optimizer
from sok.table import rules
from sok.table import state as table_state
from sok.table.table import EmbeddingVariable

# Of optimizers of TF 1 SOK takes the names of slots that these have.
_OF_V1 = {"AdadeltaOptimizer": ("accum", "accum_update"), "FtrlOptimizer": ("accum", "linear")}


class OptimizerSlots:
    """What one optimizer keeps of each row.

    Args:
        optimizer: `sok.OptimizerWrapper`, `sok.DistributedOptimizer` or one of `sok.optimizers`.

    Raises:
        TypeError: something else.
        ValueError: SOK has no name for it.
    """

    name: str  # SOK's word for the optimizer
    slots: tuple[str, ...]  # and for its slots

    def __init__(self, optimizer: Optimizer | StockOptimizer | None) -> None:
        of_tables = getattr(optimizer, "embedding_optimizer", optimizer)
        if not isinstance(of_tables, Optimizer):
            raise TypeError(
                "`optimizer` must be what trains the tables: a sok.OptimizerWrapper, a sok.DistributedOptimizer or one "
                f"of sok.optimizers. Received: {optimizer!r}."
            )
        self._optimizer = of_tables
        rule = rules.find(of_tables.rule)
        if rule.name in rules.RULES and not rule.dumped_as:
            raise ValueError(
                f"SOK's files have no names for the state of {type(self._optimizer).__name__}: known are SGD, Adagrad, "
                "Adam, Adamax, Adadelta and Ftrl. Dump without `optimizer`, or use sok.save, which takes every "
                "optimizer."
            )
        self.name = rule.dumped_as or rule.name.partition("(")[0]
        stock = type(getattr(optimizer, "optimizer", None)).__name__
        self.slots = _OF_V1.get(stock, rule.slot_names)
        if any(slot.scalar for slot in rule.slots):
            raise ValueError(
                f"SOK's files have slots that are as long as rows alone, and {type(self._optimizer).__name__} keeps "
                "one number a row. Dump without `optimizer`, or use sok.save, which takes every optimizer."
            )

    def has_state(self, variable: EmbeddingVariable) -> bool:
        """Whether this worker has slots of the table: after a first step, or `store`."""
        return bool(self.slots) and self._optimizer.slot_set in {s.name for s in table_state.slot_sets(variable)}

    def read(self, shard: Shard) -> list[tf.Tensor]:
        """Each slot of the shard's rows [n, D]; what no step has touched is what it starts as. Eager only."""
        keys, widths = shard.keys.numpy(), rules.find(self._optimizer.rule).slot_widths(shard.variable.local_dim)
        starts = [
            np.full([len(keys), width], start, np.float32)
            for width, start in zip(widths, self._optimizer.slot_inits, strict=True)
        ]
        if not self.has_state(shard.variable):
            return [tf.constant(start) for start in starts]
        slots = np.concatenate(starts, axis=1)
        found, values, _ = shard.variable.slots(self._optimizer.slot_set)
        found, order = found.numpy().astype(keys.dtype), np.argsort(keys)
        places = np.searchsorted(keys[order], found)
        if len(found) > len(keys) or (places == len(keys)).any() or (keys[order][places] != found).any():
            raise RuntimeError(f"table '{shard.variable.table_name}' got new rows while it was being dumped.")
        slots[order[places]] = values.numpy()
        return [tf.constant(part) for part in np.split(slots, np.cumsum(widths)[:-1], axis=1)]

    def store(self, variable: EmbeddingVariable, keys: tf.Tensor, rows: tf.Tensor, slots: Sequence[tf.Tensor]) -> None:
        """Puts rows of this worker [m, D] into the table, with their slots, each [m, D]. Eager only."""
        table_state.restore_rows(
            variable,
            keys,
            rows,
            tf.concat(slots, 1),
            slot_set=self._optimizer.slot_set,
            rule=self._optimizer.rule,
            slot_init=self._optimizer.slot_inits,
        )
