#!/usr/bin/env python3
"""A table that is larger than the memory it may take: rows in use are in memory, all others in a file.

python examples/larger_than_memory.py --rows 2000000 --dim 16 --memory-bytes 60000000 --check
horovodrun -np 2 python examples/larger_than_memory.py --check

Trains the same batches in memory and over a file, in turns. Ids are skewed, as in click logs: few of them often. With
--check, compares every row and every slot of the optimizer, byte by byte. Prints one line of JSON: whether they are
equal; of all workers the bytes of memory and of the file; the share of rows that a step found in memory; milliseconds
of a step in memory and over the file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import sok
from sok.job import context

AT_ONCE = 100_000


class Model:
    """A table, pooled, and an optimizer that trains it."""

    def __init__(self, name: str, options: argparse.Namespace, storage: sok.Storage | None) -> None:
        self.table = sok.EmbeddingVariable(options.dim, options.rows, name=name, seed=0, storage=storage)
        self.optimizer = sok.optimizers.Adagrad(0.05)
        self.step = tf.function(self._step, reduce_retracing=True)
        self.seconds: list[float] = []

    def _step(self, ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            (pooled,) = sok.group_embedding_lookup_sparse([self.table], [ids], combiners="sum")
            loss = tf.reduce_sum(tf.square(pooled - 1.0))
        self.optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])

    def train(self, ids: tf.Tensor) -> None:
        begin = time.perf_counter()
        self.step(ids)
        self.seconds.append(time.perf_counter() - begin)


def batch_of(number: int, options: argparse.Namespace, spread: np.ndarray) -> np.ndarray:
    """The ids [batch_size, hotness] of a whole batch: by a Zipf law, the frequent ones anywhere."""
    rng = np.random.default_rng(number)
    ranks = float(options.rows) ** rng.random([options.batch_size, options.hotness])
    return spread[ranks.astype(np.int64) - 1]


def is_equal(first: Model, second: Model) -> bool:
    """Whether this worker has the same rows and slots of both, bit for bit."""
    one, other = ((*model.table.export(), *model.table.slots(model.optimizer.slot_set)) for model in (first, second))
    return all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="ids that there are; each gets a row first")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--memory-bytes", type=int, default=12_000_000, help="of each worker")
    parser.add_argument("--path", help="folder of the file; default: a temporary one")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4096, help="of all workers together")
    parser.add_argument("--hotness", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="compare all rows and slots")
    options = parser.parse_args()

    sok.Init(global_batch_size=options.batch_size, seed=0)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        storage = sok.Storage(memory_bytes=options.memory_bytes, path=folder)
        models = [Model("in_memory", options, None), Model("over_a_file", options, storage)]
        for first in range(0, options.rows, AT_ONCE):
            ids = tf.range(first, min(options.rows, first + AT_ONCE), dtype=tf.int64)[sok.rank() :: sok.size()]
            for model in models:
                sok.lookup_sparse(model.table, tf.RaggedTensor.from_row_lengths(ids, [tf.size(ids)]), combiners="sum")
        spread = np.random.default_rng(0).permutation(options.rows)
        ids = tf.zeros([0, options.hotness], tf.int64)
        for model in models:
            model.step(ids)  # builds the graph, and makes the slots
        filled = models[1].table.stats()
        for number in range(options.steps):
            ids = tf.constant(batch_of(number, options, spread)[sok.rank() :: sok.size()])
            for model in models[:: -1 if number % 2 else 1]:
                model.train(ids)
        stats = models[1].table.stats()
        hits, misses = (stats[name] - filled[name] for name in ("hits", "misses"))
        said = {
            "memory_bytes": stats["bytes_in_memory"],
            "file_bytes": stats["bytes_in_file"],
            "hit_rate": round(hits / max(1, hits + misses), 4),
            "step_ms": [round(1e3 * float(np.median(model.seconds)), 2) for model in models],
        }
        if options.check:
            mine = tf.constant([is_equal(*models)])
            equal = context.get_transport().all_gather(mine, "larger_than_memory/equal")
            said = {"equal": bool(equal.numpy().all()), **said}
        del models, model
    if sok.rank() == 0:
        print(json.dumps(said))
    assert said.get("equal", True), "the table over a file has other rows than the one in memory"


if __name__ == "__main__":
    main()
