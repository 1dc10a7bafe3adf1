"""python -m benchmarks.small_tables: up to how many rows an embedding is better kept as an ordinary variable.

A training step of a Keras 3 model of embeddings of N rows each, one id a sample of each, uniform: as tables of sok, and
as ordinary variables on each worker. With `--optimizer SGD` their gradients are averaged with the dense ones; with
Adagrad, which squares those of equal ids one by one, each worker gets those of all. Both take turns, a window of steps.
Prints for each N, dim and batch the median milliseconds of a step, and of the quotients window by window the median and
the quartiles; then for each dim and batch the break-even: up to which N variables took no longer. On several workers:
horovodrun -np 2 python -m benchmarks.small_tables. With `--large 1000000` the model has a table of so many rows too, so
that there is an exchange anyway. docs/keras.md has figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sok
from benchmarks.machine import describe

WAYS = ("tables", "variables")
_BATCHES = 4


def model_of(sizes: list[int], dim: int, dense_size: int, optimizer: str) -> Any:
    ids = [keras.Input((1,), dtype="int64", name=f"c{i}") for i in range(len(sizes))]
    vectors = [keras.layers.Embedding(n, dim)(x) for n, x in zip(sizes, ids, strict=True)]
    x = keras.layers.Concatenate()(vectors) if len(vectors) > 1 else vectors[0]
    out = keras.layers.Dense(1)(keras.layers.Flatten()(x))
    model = sok.distributed_model(keras.Model(ids, out), sparse_as_dense_size=dense_size)
    model.compile(sok.DistributedOptimizer(getattr(keras.optimizers, optimizer)(0.01)), "mse")
    sok.broadcast_variables(model.variables)
    return model


def batches_of(sizes: list[int], batch: int) -> list[Any]:
    """A few batches of this worker; no input pipeline is timed."""
    rng = np.random.default_rng(sok.rank())
    return [
        (
            tuple(tf.constant(rng.integers(0, n, (batch, 1))) for n in sizes),
            tf.constant(rng.normal(size=(batch, 1)).astype("float32")),
        )
        for _ in range(_BATCHES)
    ]


def stepper(model: Any) -> Callable[..., Any]:
    """A training step, traced once for batches of any size."""
    ids = tuple(tf.TensorSpec([None, 1], tf.int64) for _ in model.inputs)
    return tf.function(
        lambda x, y: model.train_step((x, y)), input_signature=(ids, tf.TensorSpec([None, 1], tf.float32))
    )


def in_turns(steps: dict[str, Callable[..., Any]], batches: list[Any], windows: int, length: int) -> dict[str, Any]:
    """Milliseconds of a step of each way, window by window: [windows] each."""
    for step in steps.values():
        for batch in batches:
            step(*batch)
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for window in range(windows):
        for way in list(steps)[:: -1 if window % 2 else 1]:  # each first as often as the other
            begin = time.perf_counter()
            for i in range(length):
                steps[way](*batches[i % len(batches)])
            taken[way].append(1e3 * (time.perf_counter() - begin) / length)
    return {way: np.array(of) for way, of in taken.items()}


def break_even(rows: list[int], ratios: list[float]) -> int:
    """Of ascending numbers of rows the last before the first of which variables took longer; 0 if that is the first."""
    longer = [i for i, ratio in enumerate(ratios) if ratio > 1] + [len(rows)]
    return rows[longer[0] - 1] if longer[0] else 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 1024, 4096, 16384, 65536])
    parser.add_argument("--fields", type=int, default=1, help="embeddings of so many rows")
    parser.add_argument("--large", type=int, default=0, help="rows of one more embedding, always a table; 0: none")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 4096], help="samples of each worker")
    parser.add_argument("--optimizer", choices=["SGD", "Adagrad", "Adam"], default="Adagrad")
    parser.add_argument("--windows", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of a window")
    args = parser.parse_args(arguments)
    sok.Init(seed=1)

    def tell(line: str) -> None:
        if sok.rank() == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    about, begin, rows = describe(), time.perf_counter(), sorted(args.rows)
    tell(f"{about['cpu']}, {about['usable_cores']} cores, {sok.size()} workers, {args.windows} windows of {args.steps}")
    of_rows = f"{args.fields} embeddings of these rows" + (f", and one of {args.large:,}" if args.large else "")
    tell(f"{args.optimizer}, {of_rows}")
    tell("| rows | dim | batch | tables, ms | variables, ms | variables / tables (quartiles) |")
    tell("|---|---|---|---|---|---|")
    found: dict[tuple[int, int], list[float]] = {}
    for dim in args.dims:
        for n in rows:
            sizes = [args.large] * bool(args.large) + [n] * args.fields
            dense_size = {"tables": 0, "variables": n}
            steps = {way: stepper(model_of(sizes, dim, dense_size[way], args.optimizer)) for way in WAYS}
            for batch in args.batches:
                taken = in_turns(steps, batches_of(sizes, batch), args.windows, args.steps)
                low, middle, high = np.percentile(taken["variables"] / taken["tables"], [25, 50, 75])
                found.setdefault((dim, batch), []).append(middle)
                times = " | ".join(f"{np.median(taken[way]):.2f}" for way in WAYS)
                tell(f"| {n:,} | {dim} | {batch:,} | {times} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    tell("")
    for (dim, batch), ratios in found.items():
        tell(f"dim {dim}, batch {batch:,}: variables took no longer up to {break_even(rows, ratios):,} rows")
    tell(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
