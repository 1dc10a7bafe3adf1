"""A native table and its judge, side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from tests.reference.initial_values import Initializer
from tests.reference.keys import KEY_DTYPES
from tests.reference.table import Table

KEY_TYPES = [tf.as_dtype(dtype) for dtype in KEY_DTYPES]


class NativeTable:
    """The table ops on one handle. `expected` is the judge with the same configuration."""

    def __init__(
        self,
        *,
        dim: int = 3,
        capacity: int = 1 << 20,
        key_dtype: tf.DType = tf.int64,
        hashed: bool = True,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 11,
        init: Initializer | None = None,
        name: str = "item",
        shared_name: str | None = None,
        owner: int = -1,
        **policies: Any,
    ):
        init = init or Initializer()
        self.key_dtype, self.dim, self.world_size = key_dtype, dim, world_size
        self.expected = Table(dim, capacity, init, seed, hashed, world_size, rank)
        self.handle = _ops.lib().sok_table_handle(
            anonymous=shared_name is None,
            shared_name=shared_name or "",
            table=name,
            key_dtype=key_dtype,
            dim=dim,
            capacity=capacity,
            hashed=hashed,
            world_size=world_size,
            rank=rank,
            owner=owner,
            seed=seed,
            initializer=init.kind,
            init_a=init.a,
            init_b=init.b,
            bank=init.bank.reshape(-1).tolist(),
            **policies,
        )

    def keys(self, keys: Any) -> tf.Tensor:
        return keys if tf.is_tensor(keys) else tf.constant(np.asarray(keys, self.key_dtype.as_numpy_dtype))

    def lookup(self, keys: Any, insert: bool = True) -> tuple[tf.Tensor, tf.Tensor]:
        return _ops.lib().sok_table_lookup(self.handle, self.keys(keys), insert, dim=self.dim)

    def lookup_combine(
        self, keys: Any, row_splits: Any, weights: Any = (), combiner: str = "sum", insert: bool = True
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The group op with one feature."""
        outputs, row_ids = _ops.lib().sok_group_lookup(
            [self.handle],
            [self.keys(keys)],
            [tf.cast(row_splits, tf.int64)],
            [tf.cast(weights, tf.float32)],
            insert,
            table_of=[0],
            dims=[self.dim],
            combiners=[combiner],
        )
        return outputs[0], row_ids[0]

    def apply(
        self,
        row_ids: Any,
        grads: Any,
        *,
        hyper: Any = (1.0,),
        rule: str = "sgd",
        slot_set: str = "sgd",
        step: int = 1,
        nonfinite: str = "allow",
    ) -> Any:
        return _ops.lib().sok_group_apply(
            [self.handle],
            [tf.cast(row_ids, tf.int64)],
            [tf.cast(grads, tf.float32)],
            tf.constant(step, tf.int64),
            tf.constant(hyper, tf.float64),
            rule=rule,
            slot_set=slot_set,
            nonfinite=nonfinite,
            distinct=[False],
        )

    def assign(self, keys: Any, rows: Any) -> Any:
        return _ops.lib().sok_table_assign(self.handle, self.keys(keys), tf.cast(rows, tf.float32))

    def erase(self, keys: Any) -> int:
        return int(_ops.lib().sok_table_erase(self.handle, self.keys(keys)))

    def size(self) -> int:
        return int(_ops.lib().sok_table_size(self.handle))

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        keys, rows = _ops.lib().sok_table_export(self.handle, key_dtype=self.key_dtype, dim=self.dim)
        return keys.numpy(), rows.numpy()

    def slots(self, slot_set: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys, slots, stamps = _ops.lib().sok_table_slots(self.handle, key_dtype=self.key_dtype, slot_set=slot_set)
        return keys.numpy(), slots.numpy(), stamps.numpy()

    def as_dict(self) -> dict[int, tuple[float, ...]]:
        keys, rows = self.export()
        return {int(key): tuple(row.tolist()) for key, row in zip(keys, rows, strict=True)}


def fresh_rows(keys: Any, seed: int, init: Any, dim: int, key_dtype: tf.DType = tf.int64) -> np.ndarray:
    """The rows [n, dim] that `keys` would get, from a table that nobody else has. `init` has `kind`, `a` and `b`."""
    table = NativeTable(dim=dim, seed=seed, init=Initializer(init.kind, init.a, init.b), key_dtype=key_dtype)
    return table.lookup(keys, insert=False)[0].numpy()
