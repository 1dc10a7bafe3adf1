"""horovodrun -np 2 python -m benchmarks.exchange_dtype: a step whose rows travel in float32, and in 16 bit.

For each dim a training step (lookup, gradient, SGD) of one table by float32, float16 and bfloat16, taken in turns;
rank 0 prints a line of a table: bytes that this rank's rows and gradients have, the median time of each type, and of
its quotients to float32, turn by turn, the median and the quartiles. docs/design/exchange.md has the figures.
Run it with SOK_SHARED_MEMORY=0: workers of one host that share memory send float32 whatever their tables say.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import sok
from benchmarks.way_home import ROWS, make_batches, make_step

DTYPES = ("float32", "float16", "bfloat16")


def _table(dtype: str, way: str, dim: int) -> sok.EmbeddingVariable:
    return sok.EmbeddingVariable(dim, ROWS, name=f"exchange_{dim}_{dtype}", way_home=way, exchange_dtype=dtype)


def megabytes(step: Callable[[tf.Tensor], None], keys: tf.Tensor) -> float:
    """What this rank's rows and gradients have."""
    with sok.trace() as trace:
        step(keys)
    return sum(entry["bytes"] for name, entry in trace.by_name.items() if "/keys" not in name) / 1e6


def measure(dim: int, way: str, hotness: int, batch: int, steps: int) -> str:
    transport = sok.job.context.get_transport()
    batches = make_batches(np.random.default_rng(transport.rank), "uniform", batch, hotness)
    tensors = [tf.constant(keys, tf.int64) for keys in batches]
    run = {dtype: make_step(_table(dtype, way, dim), hotness, batch) for dtype in DTYPES}
    for keys in tensors:
        for dtype in DTYPES:
            run[dtype](keys)
    moved = {dtype: megabytes(run[dtype], tensors[0]) for dtype in DTYPES}
    seconds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for i in range(steps):
        # Each first as often as the others: what a step leaves behind, the next one finds.
        for dtype in (*DTYPES[i % 3 :], *DTYPES[: i % 3]):
            begin = time.perf_counter()
            run[dtype](tensors[i % len(tensors)])
            seconds[dtype].append(time.perf_counter() - begin)
    cells = [str(dim), *(f"{moved[dtype]:.1f}" for dtype in DTYPES[:2])]
    cells += [f"{1e3 * float(np.median(seconds[dtype])):.1f}" for dtype in DTYPES]
    for dtype in DTYPES[1:]:
        low, middle, high = np.percentile(np.divide(seconds[dtype], seconds["float32"]), [25, 50, 75])
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--way", choices=["rows", "sums", "auto"], default="rows")
    parser.add_argument("--hotness", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8192, help="samples per worker")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    sok.Init()
    transport = sok.job.context.get_transport()
    if transport.rank == 0:
        print(f"shared memory: {transport.shares_memory}, narrowed: {transport.narrowing_pays()}; {args}")
        print(
            "| dim | MB float32 | MB 16 bit | float32 ms | float16 ms | bfloat16 ms | float16 / float32 | "
            "bfloat16 / float32 |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
    for dim in args.dims:
        line = measure(dim, args.way, args.hotness, args.batch, args.steps)
        if transport.rank == 0:
            print(line, flush=True)


if __name__ == "__main__":
    main()
