"""python -m benchmarks.small_tables: up to how many rows an embedding is better kept as an ordinary variable.

A training step of a Keras model of one large table and 26 small embeddings of 16 floats, one id a sample of each,
uniform, Adagrad: with all of them tables, in one exchange, and with the small ones ordinary variables on each worker,
averaged with the dense weights. The two take turns. On several workers: horovodrun -np 2 python -m
benchmarks.small_tables. Prints a line of a table for each number of rows, and the largest at which variables take no
longer; docs/keras.md has the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sok
from benchmarks.machine import describe

LARGE = 1_000_000


def model_of(rows: int, fields: int, dim: int, dense: bool) -> Any:
    ids = [keras.Input((1,), dtype="int64", name=f"c{i}") for i in range(fields + 1)]
    sizes = [LARGE] + [rows] * fields
    vectors = [
        keras.layers.Embedding(n, dim, name=f"e{i}_{rows}")(x) for i, (n, x) in enumerate(zip(sizes, ids, strict=True))
    ]
    out = keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Concatenate()(vectors)))
    model = sok.distributed_model(keras.Model(ids, out), sparse_as_dense_size=rows if dense else 0)
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adagrad(0.01)), "mse")
    sok.broadcast_variables(model.variables)
    return model


def stepper(model: Any, rows: int, fields: int, batch: int) -> Any:
    """What makes a training step on the next batch of a few; no input pipeline is timed."""
    rng = np.random.default_rng(sok.rank())
    batches = [
        (
            tuple(tf.constant(rng.integers(0, n, (batch, 1))) for n in [LARGE] + [rows] * fields),
            tf.constant(rng.normal(size=(batch, 1)).astype("float32")),
        )
        for _ in range(4)
    ]
    train = tf.function(lambda x, y: model.train_step((x, y)), reduce_retracing=True)
    number = 0

    def step() -> None:
        nonlocal number
        train(*batches[number % len(batches)])
        number += 1

    return step


def measure(rows: int, args: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of a step with tables and with variables: medians of windows."""
    steps = [
        stepper(model_of(rows, args.fields, args.dim, dense), rows, args.fields, args.batch) for dense in (False, True)
    ]
    for step in steps:
        for _ in range(5):
            step()
    taken: list[list[float]] = [[], []]
    for _ in range(args.windows):
        for step, of in zip(steps, taken, strict=True):
            begin = time.perf_counter()
            for _ in range(args.steps):
                step()
            of.append(1e3 * (time.perf_counter() - begin) / args.steps)
    return float(np.median(taken[0])), float(np.median(taken[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 1024, 4096, 16384])
    parser.add_argument("--fields", type=int, default=26)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4096, help="of each worker")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="of a window")
    args = parser.parse_args()
    sok.Init(seed=1)

    def tell(line: str) -> None:
        if sok.rank() == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    about = describe()
    tell(f"{about['cpu']}, {about['usable_cores']} cores, {sok.size()} workers, a batch of {args.batch} each")
    tell("| rows | tables, ms | variables, ms | variables / tables |\n|---|---|---|---|")
    best = 0
    for rows in args.rows:
        tables, variables = measure(rows, args)
        best = rows if variables <= tables else best
        tell(f"| {rows:,} | {tables:.2f} | {variables:.2f} | {variables / tables:.2f} |")
    tell(f"Variables take no longer up to {best:,} rows of those tried.")


if __name__ == "__main__":
    main()
