"""Tables of different kinds, and features of them: what tests of group lookups on several workers look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import sok
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group

# (dim, key dtype, hashed) of each table, and (table, combiner, weighted) of each feature.
TABLES = [(3, tf.int64, True), (16, tf.uint32, True), (1, tf.int32, False), (8, tf.uint64, True)]
FEATURES = [
    (0, "sum", False), (1, "mean", True), (0, "sqrtn", True), (2, "mean", False), (3, "sum", False), (1, "sum", False),
]  # fmt: skip


def make_tables(name: str, capacity: int, **settings: Any) -> list[sok.EmbeddingVariable]:
    """The tables; a setting that is a list has a value for each."""
    return [
        sok.EmbeddingVariable(
            dim,
            capacity,
            name=f"{name}_{t}",
            key_dtype=dtype,
            hashed=hashed,
            **{key: value[t] if isinstance(value, list) else value for key, value in settings.items()},
        )
        for t, (dim, dtype, hashed) in enumerate(TABLES)
    ]


def lookup_pooled(table: sok.EmbeddingVariable, csr: Csr, combiner: str, training: Any = True, **limits: int) -> Any:
    """One vector per segment."""
    return lookup_group([Feature(table, csr, combiner, **limits)], training)[0]


def features_of(tables: Sequence[sok.EmbeddingVariable], inputs: Sequence[Sequence[Any]]) -> list[Feature]:
    """The features with their inputs, each of which begins with keys, row splits, and weights or None."""
    return [
        Feature(tables[table], Csr(*of_feature[:3]), combiner)
        for (table, combiner, _), of_feature in zip(FEATURES, inputs, strict=True)
    ]
