"""python -m benchmarks.one_hot: W4 with one id a feature, asked for in every way that users have, and its limit.

In turns: 26 tables in a group that gets RaggedTensors, the same with one id a sample (`[B]`), one table that holds all
others (`[B, 26]`, its ids shifted); the dense part alone, which gets vectors that cost nothing and makes their
gradients; and stock TensorFlow's `tf.gather`. Each line has the median and quartiles of a way, and how many times as
long TensorFlow took, turn by turn. docs/performance.md has the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks import towers, workloads
from benchmarks.contestants import ours, stock_tf, tensors
from benchmarks.machine import describe
from sok.lookup.lookup import lookup_rows

TABLES, DIM = workloads.W2_TABLES, workloads.W2_DIM
STOCK = "TensorFlow"


def _job(rows: int, batch: int) -> dict[str, Any]:
    sizes = {"tables": TABLES, "rows": rows, "dim": DIM, "batch": batch, "hotness": 1, "batches": 4}
    return sizes | {"optimizer": "adagrad", "hashed": False, "distributions": ["zipf"]}


def ways(rows: int, batch: int) -> dict[str, Callable[[int], tf.Tensor]]:
    """A step of each way: of the number of its turn, the loss."""
    job = _job(rows, batch)
    tables = ours._tables(job)
    together = sok.EmbeddingVariable(DIM, TABLES * rows, hashed=False, name="together")
    ours._fill_all(job, tables)
    ours.fill(together, np.arange(TABLES * rows, dtype=np.int64))
    clicks = [tuple(map(tf.constant, workloads.click_batch(i, batch))) for i in range(job["batches"])]
    flat = ours._batches(job, "zipf")
    shifted = [[tf.stack([one[2 * t] + t * rows for t in range(TABLES)], 1)] for one in flat]
    numbers = [tf.TensorSpec([batch, workloads.W4_DENSE], tf.float32), tf.TensorSpec([batch, 1], tf.float32)]
    of_tables = tensors.flat_signature(TABLES, batch)

    def trains(params: list[Any], lookups: Any, signature: list[tf.TensorSpec], ids: Any) -> Callable[[int], tf.Tensor]:
        step = ours._training_step(
            params, lookups, towers.Dlrm(TABLES, DIM), "adagrad", [*numbers, *signature], tensors.LEARNING_RATE
        )
        return lambda i: step(*clicks[i % len(clicks)], *ids[i % len(ids)])

    def one_each(ids: list[tf.Tensor]) -> list[tf.Tensor]:
        return sok.group_embedding_lookup(tables, [tf.ensure_shape(one, [batch]) for one in ids[0::2]])

    return {
        "26 tables, RaggedTensors": trains(
            tables, lambda ids: ours.pooled(tables, tensors.as_ragged(ids), "sum", training=True), of_tables, flat
        ),
        "26 tables, ids [B]": trains(tables, one_each, of_tables, flat),
        "one table, ids [B, 26]": trains(
            [together],
            lambda ids: lookup_rows(together, ids[0], training=True),
            [tf.TensorSpec([batch, TABLES], tf.int64)],
            shifted,
        ),
        "no embeddings": _dense_alone(batch, clicks),
        STOCK: stock_tf._w4(job)["zipf"],
    }


def _dense_alone(batch: int, clicks: list[Any]) -> Callable[[int], tf.Tensor]:
    """The step of a model that is given its embeddings, and hands their gradients to nobody."""
    model, rule = towers.Dlrm(TABLES, DIM), tensors.stock_optimizer("adagrad")
    given = [tf.Variable(rows) for rows in tensors.gradients_for([[batch, DIM]] * TABLES)]

    @tf.function
    def step(dense: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        embeddings = [tf.identity(rows) for rows in given]
        with tf.GradientTape() as tape:
            tape.watch(embeddings)
            loss = model.loss(embeddings, dense, labels)
        back, others = tape.gradient(loss, [embeddings, model.variables])
        rule.apply_gradients(zip(others, model.variables, strict=True))
        with tf.control_dependencies(back):
            return tf.identity(loss)

    return lambda i: step(*clicks[i % len(clicks)])


def measure(rows: int, batch: int, turns: int) -> list[str]:
    """A line of a table for each way."""
    steps = ways(rows, batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-4, turns):
        for name, step in steps.items():
            begin = time.perf_counter()
            step(turn % 4).numpy()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    lines = []
    for name, taken in seconds.items():
        low, middle, high = 1e3 * np.percentile(taken, [25, 50, 75])
        less, ratio, more = np.percentile(np.divide(seconds[STOCK], taken), [25, 50, 75])
        lines.append(f"| {name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {ratio:.2f} ({less:.2f} to {more:.2f}) |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=workloads.W2_ROWS, help="of each of the 26 tables")
    parser.add_argument("--batch", type=int, default=workloads.W2_BATCH)
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    tensors.set_threads(2)
    sok.Init(seed=1)
    about = describe()
    print(f"{about['cpu']}, {about['usable_cores']} cores, {about['isa']}")
    print(f"batch {args.batch}, {args.rows} rows a table, {args.turns} turns")
    print("| way | ms | times TensorFlow |")
    print("|---|---|---|", flush=True)
    print("\n".join(measure(args.rows, args.batch, args.turns)))


if __name__ == "__main__":
    main()
