#!/usr/bin/env python3
"""Rows for ids that come often: rare ids wait, and rows that nobody asks for leave.

python examples/policies.py                                           one worker
horovodrun -np 2 python examples/policies.py --check

Ids are as in click logs: few of them often, most of them once, and what is popular changes with time. With --check
each worker also trains the batches of all workers by itself, as a job of one; rows, histories and what waits must be
the same. Prints one line of JSON: of all workers the rows at the end, the ids that wait, and how many rows were made
and evicted; how many distinct ids there were; with --check, whether all of that is what one worker has.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import sok
from sok.job import context
from sok.job.job import Job
from sok.job.transport.local import LocalTransport

DIM, HOTNESS = 16, 4


class Model:
    """A table, pooled, and an optimizer that trains it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.table = sok.EmbeddingVariable(
            DIM,
            options.vocabulary,
            name=name,
            seed=0,  # the same, so that models of other names have the same fresh rows
            admission=sok.Admission(after=options.after),
            eviction=sok.Eviction(older_than=options.older_than),
        )
        self.optimizer = sok.optimizers.Adagrad(0.05)
        self.step = tf.function(self._step, reduce_retracing=True)

    def _step(self, ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            (pooled,) = sok.group_embedding_lookup_sparse([self.table], [ids], combiners="sum")
            loss = tf.reduce_sum(tf.square(pooled - 1.0))
        gradient = tape.gradient(loss, self.table)
        self.optimizer.apply_gradients([(gradient, self.table)])

    def found(self) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """The rows of this worker by their ids, and the history of all ids that there may be."""
        keys, rows = (tensor.numpy() for tensor in self.table.export())
        ids = tf.range(int(self.table.capacity), dtype=tf.int64)
        return dict(zip(keys.tolist(), rows, strict=True)), np.array(self.table.history(ids))


def batch_of(number: int, size: int, vocabulary: int) -> np.ndarray:
    """The ids [size, HOTNESS] of a whole batch: skewed, and what is popular moves on."""
    ids = np.random.default_rng(number).zipf(1.2, [size, HOTNESS]) + 5 * number
    return (ids % vocabulary).astype(np.int64)


def train(model: Model, options: argparse.Namespace, rank: int, workers: int) -> int:
    """Trains a worker's part of each batch. How many distinct ids the whole batches held."""
    seen: set[int] = set()
    for number in range(options.steps):
        ids = batch_of(number, options.batch_size, options.vocabulary)
        seen.update(ids.ravel().tolist())
        model.step(tf.constant(ids[rank::workers]))
    return len(seen)


def is_equal(model: Model, stats: dict[str, int], options: argparse.Namespace) -> bool:
    """Whether one worker that trains the whole batches has the rows that this one has, and the counts of all."""
    here, histories = model.found()
    rank, workers = sok.rank(), sok.size()
    before, alone = context.get_job, Job(LocalTransport())
    context.get_job = lambda: alone
    try:
        whole = Model("alone", options)
        train(whole, options, 0, 1)
        rows, of_all = whole.found()
        of_one = whole.table.stats()
    finally:
        context.get_job = before
    mine = {key: row for key, row in rows.items() if key % workers == rank}
    if here.keys() != mine.keys() or any(not np.allclose(here[key], row, 1e-4, 1e-5) for key, row in mine.items()):
        return False
    is_mine = np.arange(options.vocabulary) % workers == rank
    same_counts = all(stats[name] == of_one[name] for name in ("rows", "candidates", "made", "evicted"))
    return same_counts and bool(np.array_equal(histories, of_all * is_mine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--after", type=int, default=3, help="the n-th batch with an id gives it a row")
    parser.add_argument("--older-than", type=int, default=20, help="a row leaves that so many steps have not held")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
    parser.add_argument("--vocabulary", type=int, default=20_000, help="ids that there may be")
    parser.add_argument("--check", action="store_true", help="train on one worker, too, and compare")
    options = parser.parse_args()

    sok.Init(global_batch_size=options.batch_size, seed=0)
    model = Model("policies", options)
    distinct = train(model, options, sok.rank(), sok.size())
    stats = model.table.stats()
    said = {"ids": distinct, **{name: stats[name] for name in ("rows", "candidates", "made", "evicted")}}
    if options.check:
        equal = context.get_transport().all_gather(tf.constant([is_equal(model, stats, options)]), "policies/equal")
        said["equal"] = bool(equal.numpy().all())
    if sok.rank() == 0:
        print(json.dumps(said))
    assert said.get("equal", True), "several workers have admitted or evicted what one does not"


if __name__ == "__main__":
    main()
