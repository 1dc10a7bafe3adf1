"""python -m benchmarks.policies: what admission and eviction cost.

Two things, on one worker, each in one run:

1. A lookup for training of 65,536 keys, and a training step with them, of a table with histories (`eviction` that takes
   no row) beside one without. They take turns, window by window; printed are the medians, and of the quotients the
   median and the quartiles. Keys are uniform, or drawn by a Zipf law of exponent 1.05.
2. A pass over the table, by reason: by age, by norm, by `max_rows`. No row leaves in the first two.

docs/policies.md has figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks.machine import describe
from benchmarks.small_tables import in_turns
from sok.base import _ops

_NEVER = sok.Eviction(older_than=2**32 - 1, every=2**32 - 1)
_KEYS = 65_536
_BATCHES = 4


def keys_of(rows: int, skew: float, seed: int) -> list[Any]:
    """Batches of keys in [0, rows): uniform, or by a Zipf law of exponent `skew`."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(_BATCHES):
        if skew:
            u = rng.random(_KEYS)
            ranks = (1 - u * (1 - float(rows) ** (1 - skew))) ** (1 / (1 - skew))
            keys = np.minimum(rows, ranks.astype(np.int64)) - 1
        else:
            keys = rng.integers(0, rows, _KEYS)
        batches.append((tf.constant(keys * 7919),))  # spread as ids are
    return batches


def table_of(rows: int, dim: int, name: str, **properties: Any) -> sok.EmbeddingVariable:
    """A table that is full but for what one batch may bring."""
    table = sok.EmbeddingVariable(dim, rows + _KEYS, name=name, placement=sok.row_wise(hash=True), **properties)
    for begin in range(0, rows, 1 << 18):
        keys = np.arange(begin, min(rows, begin + (1 << 18))) * 7919
        _ops.lib().sok_table_lookup(table.handle, keys, True, dim=dim)
    return table


def looks_up(table: sok.EmbeddingVariable) -> Callable[..., Any]:
    """A lookup for training, which ends the step."""

    def step(keys: tf.Tensor) -> None:
        _ops.lib().sok_table_lookup(table.handle, keys, True, dim=table.dim)
        _ops.lib().sok_tables_count_step([table.handle])

    return step


def trains(table: sok.EmbeddingVariable) -> Callable[..., Any]:
    """A training step by SGD of the sum of all rows."""
    optimizer = sok.optimizers.SGD(1e-6)

    @tf.function
    def step(keys: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    return step


def seconds_of_a_pass(table: sok.EmbeddingVariable) -> float:
    begin = time.perf_counter()
    _ops.lib().sok_tables_count_step([table.handle])
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--windows", type=int, default=11)
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    args = parser.parse_args(arguments)
    sok.Init(seed=1)

    def tell(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    about = describe()
    tell(f"{about['cpu']}, {about['usable_cores']} cores, {args.rows:,} rows, {_KEYS:,} keys, {args.windows} windows")
    tell("| what | dim | keys | plain, ms | with histories, ms | quotient (quartiles) |")
    tell("|---|---|---|---|---|---|")
    for dim in args.dims:
        tables = {
            "plain": table_of(args.rows, dim, f"plain{dim}"),
            "counted": table_of(args.rows, dim, f"counted{dim}", eviction=_NEVER),
        }
        for what, of in ("lookup", looks_up), ("training step", trains):
            steps = {way: of(table) for way, table in tables.items()}
            for skew in (0.0, 1.05):
                taken = in_turns(steps, keys_of(args.rows, skew, dim), args.windows, args.steps)
                low, middle, high = np.percentile(taken["counted"] / taken["plain"], [25, 50, 75])
                times = " | ".join(f"{np.median(taken[way]):.2f}" for way in tables)
                law = f"Zipf {skew}" if skew else "uniform"
                tell(f"| {what} | {dim} | {law} | {times} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    tell("")
    dim = args.dims[0]
    reasons = {
        "older_than": sok.Eviction(older_than=2**31, every=1),
        "norm_below": sok.Eviction(norm_below=1e-30, every=1),
        "max_rows, a tenth leaves": sok.Eviction(max_rows=max(65_536, args.rows * 9 // 10), every=1),
    }
    for reason, eviction in reasons.items():
        table = table_of(args.rows, dim, "passed", eviction=eviction)
        tell(f"a pass by {reason}: {1e3 * seconds_of_a_pass(table):.0f} ms, {table.stats()['evicted']:,} rows went")
        del table


if __name__ == "__main__":
    main()
