"""horovodrun -np 2 python -m benchmarks.deepfm: DeepFM's 52 tables by a layer each, and by one group.

A training step of DeepFM with 26 columns (each a table of rows of 8 floats and one of a weight, an MLP of 128 and 64,
Adagrad): the tables are looked up by 52 `sok.DistributedEmbedding`, or by one `sok.group_embedding_lookup`. Both take
turns; rank 0 prints for each repeat collectives and median milliseconds of a step, and of the quotients turn by turn
the median and the quartiles. docs/performance.md has the figures. SOK_SHARED_MEMORY=0 SOK_TCP=0 lets all of it go by
Horovod.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import sok

COLUMNS, DIMS = 26, (8, 1)
ROWS = 100_000  # of each column
WAYS = ("layers", "group")
_BATCHES = 4


def _lookup(way: str) -> tuple[Callable[[list[tf.Tensor]], list[tf.Tensor]], list[sok.EmbeddingVariable]]:
    """From the ids [B, 1] of each column to the rows [B, 1, dim] of all tables, dim 8 first; and the tables."""
    widths = [dim for dim in DIMS for _ in range(COLUMNS)]
    if way == "group":
        tables = [sok.EmbeddingVariable(d, 2 * ROWS, name=f"group_{i}") for i, d in enumerate(widths)]
        return lambda ids: sok.group_embedding_lookup(tables, ids * len(DIMS)), tables
    layers = [
        sok.DistributedEmbedding(
            combiner="sum",
            max_vocabulary_size_per_gpu=2 * ROWS,
            embedding_vec_size=d,
            slot_num=1,
            max_nnz=1,
            name=f"layer_{i}",
        )
        for i, d in enumerate(widths)
    ]
    tables = [layer.embedding_variable for layer in layers]
    return lambda ids: [layer(x, training=True) for layer, x in zip(layers, ids * len(DIMS), strict=True)], tables


def make_step(way: str, batch: int) -> Callable[[tf.Tensor, tf.Tensor], None]:
    """A training step that takes ids [B, 26] and labels [B]."""
    lookup, tables = _lookup(way)
    dense = [tf.keras.layers.Dense(n, activation="relu" if n > 1 else None) for n in (128, 64, 1)]
    mlp = tf.keras.Sequential([tf.keras.Input([COLUMNS * DIMS[0]]), *dense])
    sok.broadcast_variables(mlp.trainable_variables)
    rule, dense_rule = sok.optimizers.Adagrad(0.01), tf.keras.optimizers.Adagrad(0.01)
    dense_rule.build(mlp.trainable_variables)

    @tf.function(input_signature=[tf.TensorSpec([batch, COLUMNS], tf.int64), tf.TensorSpec([batch], tf.float32)])
    def step(ids: tf.Tensor, labels: tf.Tensor) -> None:
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            found = lookup(tf.split(ids, COLUMNS, axis=1))
            rows, weights = tf.concat(found[:COLUMNS], axis=1), tf.concat(found[COLUMNS:], axis=1)
            total = tf.reduce_sum(rows, axis=1)
            pairs = 0.5 * tf.reduce_sum(tf.square(total) - tf.reduce_sum(tf.square(rows), axis=1), axis=1)
            deep = mlp(tf.reshape(rows, [batch, COLUMNS * DIMS[0]]))[:, 0]
            logits = tf.reduce_sum(weights, axis=[1, 2]) + pairs + deep
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        of_tables, of_dense = tape.gradient(loss, [tables, mlp.trainable_variables])
        rule.apply_gradients(zip(of_tables, tables, strict=True))
        dense_rule.apply_gradients(zip(of_dense, mlp.trainable_variables, strict=True))

    return step


def measure(run: dict[str, Callable[..., None]], batches: list[tuple[tf.Tensor, tf.Tensor]], steps: int) -> str:
    """The rest of a line: median milliseconds of each way, and the quotients."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(steps):
        for way in WAYS[:: 1 if i % 2 else -1]:  # each first as often as the other
            begin = time.perf_counter()
            run[way](*batches[i % len(batches)])
            seconds[way].append(time.perf_counter() - begin)
    cells = [f"{1e3 * float(np.median(seconds[way])):.1f}" for way in WAYS]
    low, middle, high = np.percentile(np.divide(seconds["layers"], seconds["group"]), [25, 50, 75])
    return f"{' | '.join(cells)} | {middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=512, help="samples per worker")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sok.Init(seed=1)
    rng = np.random.default_rng(sok.rank())
    batches = []
    for _ in range(_BATCHES):
        ids = rng.zipf(1.2, [args.batch, COLUMNS]) % ROWS
        batches.append((tf.constant(ids, tf.int64), tf.constant(rng.integers(0, 2, args.batch), tf.float32)))
    run = {way: make_step(way, args.batch) for way in WAYS}
    collectives = []
    for way in WAYS:
        for batch in batches:  # makes the rows
            run[way](*batch)
        with sok.trace() as trace:
            run[way](*batches[0])
        collectives.append(f"{trace.collectives}")
    if sok.rank() == 0:
        print(f"shared memory: {sok.job.context.get_transport().shares_memory}; {args}")
        print(
            "| collectives: layers | group | layers ms | group ms | layers / group |\n|---|---|---|---|---|", flush=True
        )
    for _ in range(args.repeats):
        line = measure(run, batches, args.steps)
        if sok.rank() == 0:
            print(f"| {' | '.join(collectives)} | {line} |", flush=True)


if __name__ == "__main__":
    main()
