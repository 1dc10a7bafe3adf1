#!/usr/bin/env python3
"""DLRM on Criteo's log, every table where it belongs: sok.parallel, placed by sok.plan or by Merlin's rules.

python examples/dlrm.py                                                  one worker
horovodrun -np 2 python examples/dlrm.py --strategy auto --check         two, beside stock Keras on one, as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import tensorflow as tf
from criteo.data import ClickLog
from criteo.generate import cached_log, cached_path

import distributed_embeddings.python.layers.dist_model_parallel as dmp
import sok
from sok.job.context import get_transport

WARM_UP = 3  # steps that are not timed: they are traced, and make slots


class Dlrm:
    """Tables for 26 features, a bottom tower for 13 numbers, the products of each two, a top tower."""

    def __init__(self, embed: Any, dim: int) -> None:
        dense = tf.keras.layers.Dense
        self.embed = embed
        self.bottom = tf.keras.Sequential([dense(n, "relu") for n in (64, 32, dim)])
        self.top = tf.keras.Sequential([*[dense(n, "relu") for n in (64, 32)], dense(1)])

    def __call__(self, numbers: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        low = self.bottom(numbers)  # [b, dim]
        vectors = tf.stack([low, *self.embed(tf.unstack(keys, axis=1))], 1)  # [b, 27, dim]
        products = tf.matmul(vectors, vectors, transpose_b=True)
        rows, columns = np.tril_indices(vectors.shape[1], -1)
        pairs = tf.gather(
            tf.reshape(products, [-1, products.shape[1] * products.shape[2]]), rows * 27 + columns, axis=1
        )
        return self.top(tf.concat([low, pairs], 1))[:, 0]

    @property
    def towers(self) -> list[Any]:
        return [*self.bottom.trainable_variables, *self.top.trainable_variables]


def loss_of(model: Dlrm, batch: list[Any]) -> tf.Tensor:
    numbers, keys, labels = batch
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, model(numbers, keys)))


def batches_of(options: argparse.Namespace) -> list[list[np.ndarray]]:
    """Global batches, all of one size: numbers, keys and labels."""
    if options.data is None and sok.local_rank() == 0:
        cached_log("out/criteo", options.rows, 0)
    get_transport().barrier("generated")
    log = ClickLog(options.data or str(cached_path("out/criteo", options.rows, 0)))
    found: list[list[np.ndarray]] = []
    while len(found) < options.steps + WARM_UP:
        before = len(found)
        for batch in log.batches("train", options.batch_size):
            if len(batch.labels) == options.batch_size and len(found) < options.steps + WARM_UP:
                found.append([batch.dense, batch.keys, batch.labels])
        if len(found) == before:
            raise SystemExit(f"{log.path} has no batch of {options.batch_size} lines: take a smaller --batch-size.")
    return found


def train(model: Dlrm, optimizer: Any, variables: Any, batches: list[list[np.ndarray]]) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss."""

    @tf.function(reduce_retracing=True)
    def step(batch: list[tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(model, batch)
        weights = variables()
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    seconds = []
    for batch in batches:
        started = time.perf_counter()
        loss = float(step([tf.constant(part) for part in batch]))
        seconds.append(time.perf_counter() - started)
    return seconds, loss


def on_one_worker(model: Dlrm, start: dict[str, list[Any]], batches: list[list[np.ndarray]], rate: float) -> list[Any]:
    """All weights after the same steps of stock Keras, without sok."""
    tables = [tf.keras.layers.Embedding(*matrix.shape) for matrix in start["tables"]]
    alone = Dlrm(lambda ids: [table(one) for table, one in zip(tables, ids, strict=True)], start["tables"][0].shape[1])
    loss_of(alone, batches[0])
    for table, matrix in zip(tables, start["tables"], strict=True):
        table.set_weights([matrix])
    alone.bottom.set_weights(start["bottom"])
    alone.top.set_weights(start["top"])
    variables = [*[table.trainable_variables[0] for table in tables], *alone.towers]
    train(alone, tf.keras.optimizers.SGD(rate), lambda: variables, batches)
    return [np.asarray(variable) for variable in variables]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="FILE", default=os.environ.get("SOK_CRITEO_SAMPLE"), help="Criteo's log")
    parser.add_argument("--rows", type=int, default=20_000, help="lines to generate without one")
    parser.add_argument("--strategy", default="auto", help="auto, basic, memory_balanced or memory_optimized")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers together")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--machine", help="constants for the plan; see sok plan")
    parser.add_argument("--check", action="store_true", help="compare with stock Keras on one worker; print JSON")
    options = parser.parse_args()

    sok.Init(global_batch_size=options.batch_size, seed=0)
    tf.keras.utils.set_random_seed(0)
    batches = batches_of(options)
    distinct = [len(np.unique(batches[0][1][:, i])) / options.batch_size for i in range(26)]
    sizes = [len(np.unique(np.concatenate([keys[:, i] for _, keys, _ in batches]))) + 1 for i in range(26)]
    for batch in batches:  # ids become row numbers; keys that share one are as good for a demonstration
        batch[1] = batch[1] % np.array(sizes)

    tables = [tf.keras.layers.Embedding(size, options.dim, name=f"table_{i}") for i, size in enumerate(sizes)]
    arguments: dict[str, Any] = {}
    if options.strategy == "auto":
        arguments["plan"] = {
            **{"batch": options.batch_size, "machine": options.machine, "optimizer": "sgd", "distinct": distinct},
            "dense_parameters": sum(a * b for a, b in ((13, 64), (64, 32), (32, 16), (367, 64), (64, 32), (32, 1))),
        }
    embed = dmp.DistributedEmbedding(tables, strategy=options.strategy, **arguments)
    model = Dlrm(embed, options.dim)
    share = options.batch_size // sok.size()
    mine = slice(sok.rank() * share, (sok.rank() + 1) * share)
    parts = [[part[mine] for part in batch] for batch in batches]
    loss_of(model, parts[0])  # makes the weights
    dmp.broadcast_variables(model.towers, root_rank=0)
    start = {"tables": embed.get_weights(), "bottom": model.bottom.get_weights(), "top": model.top.get_weights()}

    optimizer = sok.DistributedOptimizer(tf.keras.optimizers.SGD(options.learning_rate))
    weights = lambda: [*embed.trainable_variables, *model.towers]  # noqa: E731
    train_steps = train(model, optimizer, weights, parts[:WARM_UP])[0]
    before = sok.collective_counts()["collectives"]
    seconds, loss = train(model, optimizer, weights, parts[WARM_UP:])
    collectives = (sok.collective_counts()["collectives"] - before) / len(seconds)
    median = tf.constant([float(np.median(seconds))])
    slowest = float(tf.reduce_max(get_transport().all_gather(median, "seconds")))
    after = embed.get_weights()
    if sok.rank():
        return
    if not options.check:
        print(
            f"{len(train_steps) + len(seconds)} steps of {options.batch_size}: {1e3 * slowest:.1f} ms, loss {loss:.4f}"
        )
        return
    found = [*after, *map(np.asarray, model.towers)]
    expected = on_one_worker(model, start, batches, options.learning_rate)
    plan = embed.plan
    print(
        json.dumps(
            {
                "max_difference_to_one_worker": max(
                    float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)
                ),
                "collectives_per_step": collectives,
                "predicted_ms": plan and plan.step_ms,
                "measured_ms": 1e3 * slowest,
                "plan": plan.as_dict()["tables"] if plan else embed.strategy.table_ids,
            }
        )
    )


if __name__ == "__main__":
    main()
