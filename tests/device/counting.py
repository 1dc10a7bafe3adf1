"""What a training step asks of a device, as the emulator counts it: launches, copies, waits of the host."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.base import _ops

from .conftest import GPU

SEGMENTS, HOTNESS, NUM_KEYS = 6, 2, 40
# Features and tables of a step; 58 of 55: Merlin's synthetic model `tiny`.
SHAPES = {1: 1, 26: 26, 58: 55, 107: 107}


@dataclasses.dataclass(frozen=True)
class Counts:
    """In the order of `sok_emulator_counts`."""

    launches: int
    copies: int
    sets: int
    to_device: int
    to_host: int
    bytes: int
    pageable: int
    marks: int
    waits: int
    host_waits: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def so_far() -> Counts:
    found = (ctypes.c_int64 * len(dataclasses.fields(Counts)))()
    ctypes.CDLL(str(_ops.library_path())).sok_emulator_counts(found)
    return Counts(*found)


def make_step(
    features: int, rank: int = 0, ids_on_gpu: bool = False, key_dtype: tf.DType = tf.int64
) -> Callable[[], None]:
    """A step of hashed tables with Adagrad and known keys: lookup, gradients, update.

    Ids lie on the host, as they do in most jobs, unless it is said that a step has them on the device; what the dense
    layers would give back lies on the device, so that no op of TensorFlow's is counted.
    """
    rng = np.random.default_rng(rank)
    with tf.device(GPU):
        tables = [
            sok.EmbeddingVariable(
                (8, 16)[t % 2], 1000, hashed=True, seed=t, name=f"counted_{features}_{t}", key_dtype=key_dtype
            )
            for t in range(SHAPES[features])
        ]
        of_feature = [tables[f % len(tables)] for f in range(features)]
        upstream = [tf.identity(tf.ones([SEGMENTS, int(table.dim)])) for table in of_feature]
    optimizer = sok.optimizers.Adagrad(0.1)
    n = SEGMENTS * HOTNESS
    with tf.device("/CPU:0"):
        ids = [
            tf.RaggedTensor.from_row_splits(
                tf.constant(rng.integers(0, NUM_KEYS, n), key_dtype), tf.constant(np.arange(0, n + 1, HOTNESS))
            )
            for _ in range(features)
        ]

    @tf.function
    def step(ids, upstream):
        with tf.device(GPU):
            if ids_on_gpu:
                ids = [one.with_values(tf.identity(one.values)) for one in ids]
            with tf.GradientTape() as tape:
                outputs = sok.group_embedding_lookup_sparse(of_feature, ids, ["sum"] * features)
            grads = tape.gradient(outputs, tables, output_gradients=upstream)
            optimizer.apply_gradients(zip(grads, tables, strict=True))

    if ids_on_gpu:
        with tf.device(GPU):
            ids = [one.with_values(tf.identity(one.values)) for one in ids]
    return lambda: step(ids, upstream)


def of_a_step(*how: Any) -> Counts:
    """What the step of `make_step(*how)` asks for when all has its size."""
    step = make_step(*how)
    for _ in range(3):
        step()
    wait()
    before = so_far()
    step()
    wait_for_host()
    counted = so_far() - before
    wait()
    return counted


def wait_for_host() -> None:
    """Until the ops of a step have returned; the device may still work."""
    tf.constant(0).cpu()
    from tensorflow.python.eager import context

    context.context().executor.wait()


def wait() -> None:
    wait_for_host()
    with tf.device(GPU):
        tf.identity(tf.ones([1])).numpy()


if __name__ == "__main__":
    sok.Init()
    if GPU.startswith("/EMULATED"):
        for features in SHAPES:
            for where, ids_on_gpu in (("host", False), ("device", True)):
                counted = of_a_step(features, sok.rank(), ids_on_gpu)
                print(f"worker {sok.rank()} of {sok.size()}, {features} features, ids of the {where}: {counted}")
    else:  # for a profiler
        run = make_step(58)
        for _ in range(20):
            run()
        wait()
