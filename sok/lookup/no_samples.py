"""Batches and ids of no samples, which a worker without data takes part with."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from sok.lookup.feature import Csr


def emptied(ids: Csr) -> Csr:
    """The same of no samples."""
    sizes = ids.keys.shape.as_list()
    sizes = [size or 0 for size in sizes] if None in sizes else [0, *sizes[1:]]
    return dataclasses.replace(
        ids,
        keys=tf.zeros(sizes, ids.keys.dtype),
        row_splits=None if ids.row_splits is None else tf.zeros([1], ids.row_splits.dtype),
        weights=None if ids.weights is None else tf.zeros(sizes, ids.weights.dtype),
    )


def without_samples(spec: tf.TypeSpec) -> Any:
    """What a batch has there that has no samples."""
    shape = spec.shape
    sizes = [0] if shape.rank is None else [0, *(size or 0 for size in shape[1:])] if shape.rank else []
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(sizes)], tf.int64), tf.zeros([0], spec.dtype), sizes)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *sizes[spec.ragged_rank + 1 :]], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank)
    return tf.zeros(sizes, spec.dtype)
