"""Optimizer state of tables under the names that SOK v2 gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok import table_state
from sok.formats.shard import Shard
from sok.optimizers.adagrad import Adagrad
from sok.optimizers.adam import Adam
from sok.optimizers.base import Optimizer
from sok.optimizers.buffered import Buffered
from sok.optimizers.sgd import SGD
from sok.table import EmbeddingVariable

# What SOK calls a stock optimizer, and its slots, in the order in which every Keras makes them. It looks for a known
# name in that of the class and takes the last that it finds, so that Adamax is 'Adam'.
_STOCK = {
    "SGD": ("SGD", ("momentum",)),
    "MomentumOptimizer": ("SGD", ("momentum",)),
    "Adam": ("Adam", ("m", "v", "vhat")),
    "Adamax": ("Adam", ("m", "v")),
    "Adadelta": ("Adadelta", ("accum_grad", "accum_var")),
    "AdadeltaOptimizer": ("Adadelta", ("accum", "accum_update")),
    "Ftrl": ("Ftrl", ("accumulator", "linear")),
    "FtrlOptimizer": ("Ftrl", ("accum", "linear")),
}


class OptimizerSlots:
    """What one optimizer keeps of each row.

    Args:
        optimizer: `sok.OptimizerWrapper`, `sok.DistributedOptimizer` or one of `sok.optimizers`.

    Raises:
        TypeError: something else.
        ValueError: SOK has no name for it.
    """

    name: str  # SOK's word for the optimizer
    slots: tuple[str, ...]

    def __new__(cls, optimizer: Any) -> OptimizerSlots:
        tables = getattr(optimizer, "embedding_optimizer", optimizer)
        if isinstance(tables, Optimizer):
            return object.__new__(_Fused)
        if isinstance(tables, Buffered):
            return object.__new__(_Kept)
        raise TypeError(
            "`optimizer` must be what trains the tables: a sok.OptimizerWrapper, a sok.DistributedOptimizer or one of "
            f"sok.optimizers. Received: {optimizer!r}."
        )

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = getattr(optimizer, "embedding_optimizer", optimizer)

    def has_state(self, variable: EmbeddingVariable) -> bool:
        """Whether this worker has slots of the table: after a first step, or `store`."""
        raise NotImplementedError

    def read(self, shard: Shard) -> list[tf.Tensor]:
        """Each slot of the shard's rows [n, D]; what no step has touched is what it starts as. Eager only."""
        raise NotImplementedError

    def store(self, variable: EmbeddingVariable, keys: tf.Tensor, rows: tf.Tensor, slots: Sequence[tf.Tensor]) -> None:
        """Puts rows of this worker [m, D] into the table, with their slots, each [m, D]. Eager only."""
        raise NotImplementedError


class _Fused(OptimizerSlots):
    """Slots that lie beside the weights of a row."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        known = {SGD: ("SGD", ()), Adagrad: ("Adagrad", ("accumulator",)), Adam: ("Adam", ("m", "v"))}
        self.name, self.slots = next(found for cls, found in known.items() if isinstance(self._optimizer, cls))
        self._start = getattr(self._optimizer, "initial_accumulator_value", 0.0)

    def has_state(self, variable: EmbeddingVariable) -> bool:
        return bool(self.slots) and self._optimizer.slot_set in {s.name for s in table_state.slot_sets(variable)}

    def read(self, shard: Shard) -> list[tf.Tensor]:
        keys, dim = shard.keys.numpy(), shard.variable.dim
        slots = np.full([len(keys), len(self.slots) * dim], self._start, np.float32)
        if self.has_state(shard.variable):
            found, values, _ = shard.variable.slots(self._optimizer.slot_set)
            found, order = found.numpy().astype(keys.dtype), np.argsort(keys)
            places = np.searchsorted(keys[order], found)
            if len(found) > len(keys) or (places == len(keys)).any() or (keys[order][places] != found).any():
                raise RuntimeError(f"table '{shard.variable.table_name}' got new rows while it was being dumped.")
            slots[order[places]] = values.numpy()
        return [tf.constant(part) for part in np.split(slots, len(self.slots), axis=1)] if self.slots else []

    def store(self, variable: EmbeddingVariable, keys: tf.Tensor, rows: tf.Tensor, slots: Sequence[tf.Tensor]) -> None:
        table_state.restore_rows(
            variable,
            keys,
            rows,
            tf.concat(slots, 1),
            slot_set=self._optimizer.slot_set,
            rule=self._optimizer.rule,
            slot_init=self._start,
        )


class _Kept(OptimizerSlots):
    """Slots of stock optimizers that `sok.OptimizerWrapper` keeps in tables of their own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        stock = self._optimizer.stock
        if type(stock).__name__ not in _STOCK:
            raise ValueError(
                f"SOK's files have no names for the state of {type(stock).__name__}: known are SGD, Adagrad, Adam, "
                "Adamax, Adadelta and Ftrl. Dump without `optimizer`, or use sok.save, which takes every optimizer."
            )
        self.name, self.slots = _STOCK[type(stock).__name__]

    def has_state(self, variable: EmbeddingVariable) -> bool:
        return self._optimizer.has_slots(variable)

    def read(self, shard: Shard) -> list[tf.Tensor]:
        slots = self._optimizer.slots_of(shard.variable)
        self._check(slots)
        numbers = slots.row_numbers(tf.cast(shard.keys, shard.variable.key_dtype))
        return slots.read(numbers)

    def store(self, variable: EmbeddingVariable, keys: tf.Tensor, rows: tf.Tensor, slots: Sequence[tf.Tensor]) -> None:
        kept = self._optimizer.slots_of(variable)
        self._check(kept)
        variable.assign(keys, rows)
        kept.store(kept.row_numbers(keys), slots)

    def _check(self, slots: Any) -> None:
        if slots.num_slots != len(self.slots):
            raise ValueError(
                f"{type(self._optimizer.stock).__name__} has {slots.num_slots} slots, and SOK's files have names for "
                f"{len(self.slots)}: {', '.join(self.slots)}."
            )
