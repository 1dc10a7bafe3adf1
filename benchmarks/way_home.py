"""horovodrun -np 2 python -m benchmarks.way_home: where rows, and where partial sums, are the faster way home.

For each dim, hotness and distribution a training step (lookup, gradient, SGD) of one table by 'rows', 'sums' and
'auto', taken in turns; rank 0 prints a line of a table: what is asked for, the median time of each way, and which
'auto' took.
docs/design/exchange.md has the figures from which the rule was set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import sok
from benchmarks.workloads import Zipf, permuted
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group

ROWS = 1_000_000
WAYS = ("rows", "sums", "auto")
BATCHES = 4


def make_batches(rng: np.random.Generator, distribution: str, batch: int, hotness: int) -> list[np.ndarray]:
    zipf = Zipf(ROWS, 1.05) if distribution == "zipf" else None
    size = batch * hotness
    return [
        permuted(zipf.draw(rng, size), ROWS, 0) if zipf is not None else rng.integers(0, ROWS, size)
        for _ in range(BATCHES)
    ]


def counts_of(keys: np.ndarray, hotness: int, world_size: int) -> tuple[int, int]:
    """Distinct keys of a batch, and pieces: pairs of a segment and an owner."""
    segments = np.repeat(np.arange(len(keys) // hotness), hotness)
    return len(np.unique(keys)), len(np.unique(segments * world_size + keys % world_size))


def make_step(table: sok.EmbeddingVariable, hotness: int, batch: int) -> Callable[[tf.Tensor], None]:
    """A training step that takes batch * hotness keys."""
    optimizer = sok.optimizers.SGD(0.01)
    splits = tf.range(batch + 1, dtype=tf.int64) * hotness

    @tf.function
    def step(keys: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_group([Feature(table, Csr(keys, splits), "sum")])[0])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    return step


def _table(way: str, dim: int, name: str) -> sok.EmbeddingVariable:
    return sok.EmbeddingVariable(dim, ROWS, name=f"{name}_{way}", way_home=way)


def rows_home(step: Callable[[tf.Tensor], None], keys: tf.Tensor) -> int:
    """Bytes that this rank's answers have: what tells the ways apart."""
    with sok.trace() as trace:
        step(keys)
    return sum(entry["bytes"] for name, entry in trace.by_name.items() if "/rows" in name)


def measure(dim: int, hotness: int, distribution: str, batch: int, steps: int) -> str:
    transport = sok.job.context.get_transport()
    rng = np.random.default_rng(transport.rank)
    batches = make_batches(rng, distribution, batch, hotness)
    tensors = [tf.constant(keys, tf.int64) for keys in batches]
    name = f"way_{dim}_{hotness}_{distribution}"
    run = {way: make_step(_table(way, dim, name), hotness, batch) for way in WAYS}
    for keys in tensors:
        for way in WAYS:
            run[way](keys)
    sent = {way: rows_home(run[way], tensors[0]) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(steps):
        for way in WAYS:
            begin = time.perf_counter()
            run[way](tensors[i % BATCHES])
            seconds[way].append(time.perf_counter() - begin)
    distinct, pieces = counts_of(batches[0], hotness, transport.size)
    median = {way: 1e3 * float(np.median(seconds[way])) for way in WAYS}
    took = "sums" if sent["auto"] == sent["sums"] != sent["rows"] else "rows"
    size = 8 + 8 * dim
    moved = (8 * batch * hotness + pieces * size) / (distinct * size)
    return (
        f"| {dim} | {hotness} | {distribution} | {distinct:,} | {pieces:,} | {moved:.2f} | {median['rows']:.1f} | "
        f"{median['sums']:.1f} | {median['auto']:.1f} | {took} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--hotness", type=int, nargs="+", default=[1, 2, 5, 10, 50])
    parser.add_argument("--distributions", nargs="+", choices=["uniform", "zipf"], default=["uniform", "zipf"])
    parser.add_argument("--batch", type=int, default=8192, help="samples per worker")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    sok.Init()
    is_first = sok.job.context.get_transport().rank == 0
    if is_first:
        print(
            "| dim | hotness | keys | distinct | pieces | sums/rows moved | rows ms | sums ms | auto ms | auto took |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for dim in args.dims:
        for hotness in args.hotness:
            for distribution in args.distributions:
                line = measure(dim, hotness, distribution, args.batch, args.steps)
                if is_first:
                    print(line, flush=True)


if __name__ == "__main__":
    main()
