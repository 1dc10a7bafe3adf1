"""What the TensorFlow contestants (ours, stock, TFRA) share: threads, inputs as tensors, optimizers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf

from benchmarks.workloads import Bags

LEARNING_RATE = 0.01


def set_threads(threads: int) -> None:
    """Before anything else runs."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def flat(bags: Bags, keys: Any = None) -> list[tf.Tensor]:
    """values and row_splits of each table in turn, as a function takes them. keys(ids, t): what stands for the ids."""
    tensors = []
    for t in range(bags.num_tables):
        ids, splits = bags.table(t)
        tensors += [tf.constant(ids if keys is None else keys(ids, t)), tf.constant(splits)]
    return tensors


def flat_signature(tables: int, batch: int) -> list[tf.TensorSpec]:
    """What fits `flat` of any batch."""
    return [tf.TensorSpec([None], tf.int64), tf.TensorSpec([batch + 1], tf.int64)] * tables


def as_ragged(tensors: Sequence[tf.Tensor]) -> list[tf.RaggedTensor]:
    """One RaggedTensor [B, None] per table from what `flat` gave. Made inside the function: it costs nothing there."""
    return [
        tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        for values, splits in zip(tensors[0::2], tensors[1::2], strict=True)
    ]


def in_one_call(step: Any, batches: Sequence[Sequence[tf.Tensor]]) -> Any:
    """A function that runs `step` on each of the batches in turn: Keras' steps_per_execution.

    A call of a function with 52 tensors costs a millisecond in Python, before any TensorFlow op runs.
    """

    @tf.function
    def run() -> list[Any]:
        return [step(*flat) for flat in batches]

    return run


def gradients_for(shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """What comes back to the lookups of W2 from a model that is not there."""
    return [tf.random.stateless_normal(shape, [5, i], stddev=1e-3) for i, shape in enumerate(shapes)]


def stock_optimizer(name: str, learning_rate: float = LEARNING_RATE) -> Any:
    """Stock optimizer for dense variables and for stock tables: tf_keras' legacy ones, the fastest on IndexedSlices."""
    from tf_keras.optimizers import legacy

    makers = {"sgd": legacy.SGD, "adagrad": legacy.Adagrad, "adam": legacy.Adam, "lazyadam": legacy.Adam}
    return makers[name](learning_rate)
