"""horovodrun -np 2 python -m benchmarks.commits: what a commit of `sok.elastic` takes, into files and to a neighbour.

Two tables of equal rows, trained alike by LazyAdam: commits of the one go into files, those of the other to a neighbour
(`replicas=1`). They take turns, and each is first as often as the other. Prints for each number of rows that have
changed the median milliseconds of both and their quartiles, and of the quotients round by round the same; before that
what the first commit, of all rows, takes. With one worker, which has no neighbour, both are in files. docs/elastic.md
has figures.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks.machine import describe
from sok.job import context
from sok.job.agreement import together

WAYS: dict[str, dict[str, Any]] = {"files": {}, "neighbour": {"replicas": 1, "save_every": 2**30}}
_ROWS_AT_A_TIME = 1 << 16


class Way:
    """A table, its optimizer, and a state that commits them in one way."""

    def __init__(self, name: str, folder: Path, rows: int, dim: int) -> None:
        capacity = 2 * rows // sok.size() + 1024  # workers have not quite as many
        self.table = sok.EmbeddingVariable(dim, capacity, name=f"to_{name}", seed=1)
        self.optimizer = sok.optimizers.LazyAdam(0.01)
        self.state = sok.elastic.State(folder / name, [self.table, self.optimizer], **WAYS[name])
        self.state._sync()  # as `sok.elastic.run` begins
        for first in range(0, rows, _ROWS_AT_A_TIME):
            self.train(np.arange(first, min(rows, first + _ROWS_AT_A_TIME)))

    def train(self, keys: np.ndarray) -> None:
        """A step whose global batch has these keys."""
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.table, tf.constant(keys[sok.rank() :: sok.size()], tf.int64))
            loss = tf.reduce_sum(rows**2)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])

    def commit(self) -> float:
        """Milliseconds."""
        context.get_transport().barrier("benchmarks/commits")
        begin = time.perf_counter()
        self.state.commit()
        return 1e3 * (time.perf_counter() - begin)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--changed", type=int, nargs="+", default=[20_000, 200_000], help="rows between two commits")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--path", type=Path, help="folder for the files, seen by all workers (default: a temporary one)"
    )
    args = parser.parse_args(arguments)
    sok.Init(seed=1)
    transport = context.get_transport()
    made = together(
        transport, "benchmarks/commits/folder", lambda: None if sok.rank() else tempfile.mkdtemp(dir=args.path)
    )
    folder = Path(made[0])

    def tell(line: str) -> None:
        if sok.rank() == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    about, rng = describe(), np.random.default_rng(1)
    tell(
        f"{about['cpu']}, {about['usable_cores']} cores, {sok.size()} workers, {args.rounds} rounds, files in {folder}"
    )
    tell(f"{args.rows:,} rows of dim {args.dim} with the slots of LazyAdam")
    ways = {name: Way(name, folder, args.rows, args.dim) for name in WAYS}
    for name, way in ways.items():
        tell(f"first commit, of all rows, {name}: {way.commit():.0f} ms")
    tell("| rows changed | files, ms (quartiles) | neighbour, ms (quartiles) | neighbour / files (quartiles) |")
    tell("|---|---|---|---|")
    for changed in args.changed:
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.rounds):
            keys = rng.choice(args.rows, changed, replace=False)
            for name in list(ways)[:: -1 if number % 2 else 1]:
                ways[name].train(keys)
                taken[name].append(ways[name].commit())
        of_files, of_neighbour = (np.array(taken[name]) for name in WAYS)
        columns = (of_files, 1), (of_neighbour, 1), (of_neighbour / of_files, 2)
        told = [_spread(values, digits) for values, digits in columns]
        tell(f"| {changed:,} | {' | '.join(told)} |")
    transport.barrier("benchmarks/commits/end")
    if sok.rank() == 0:
        shutil.rmtree(folder)


def _spread(values: np.ndarray, digits: int) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
