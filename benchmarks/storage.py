"""python -m benchmarks.storage: what tables over a file cost, beside tables in memory, RocksDB and a mapped file.

For each dim, each size of the cache and each law of keys (uniform, or Zipf of exponent 1.05, spread over the rows by a
permutation): a lookup of 16,384 keys, and a training step of Adagrad with them. Everybody has the same rows and gets
the same batches; RocksDB has as much memory as the table over a file, and a mapped file what the system gives it. They
take turns, window by window; printed are the medians, and of the quotients the median and the quartiles. Also: the
share of rows that were in the cache, reads of the file for each distinct key of a batch, and bytes written for each
byte of rows that changed. Last, the random reads that the disk gives by itself (fio, or threads), and how many of them
the table used. RocksDB needs librocksdb-dev; without it its columns are empty, and the reason is printed.

--ahead measures instead what `sok.ahead` hides of the reads (benchmarks/storage_ahead.py). --path is the folder of all
files: on a disk, or on tmpfs (/dev/shm). --out FOLDER writes the figures as JSON, and a picture of them.
docs/storage.md has figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

import sok
from benchmarks import storage_ahead
from benchmarks.machine import describe
from benchmarks.stores.base import Store, Unavailable
from benchmarks.stores.disk import file_system, random_reads
from benchmarks.stores.mapped import Mapped
from benchmarks.stores.rocksdb import RocksDB
from benchmarks.stores.tables import Table, over_a_file

_AT_ONCE = 1 << 18
LAWS = {"Zipf 1.05": 1.05, "uniform": 0.0}
STORES = ("memory", "file", "RocksDB", "mmap")


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int
    keys: int
    windows: int
    steps: int  # of a window
    warm: int  # steps before


@dataclasses.dataclass(frozen=True)
class Point:
    """What was measured of one case."""

    what: str
    dim: int
    law: str
    share: float  # of the rows that have room in the cache
    ms: dict[str, list[float]]  # of each store, window by window
    hit_rate: float
    reads_per_key: dict[str, float]
    write_amplification: dict[str, float]
    reads_per_second: float  # of the table over a file

    def quotient(self, store: str, other: str) -> str:
        """Median and quartiles of how many times as long as `other` a store takes; '' where one is missing."""
        if store not in self.ms or other not in self.ms:
            return ""
        low, middle, high = np.percentile(np.array(self.ms[store]) / self.ms[other], [25, 50, 75])
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def batches_of(rows: int, keys: int, skew: float, count: int, seed: int = 0) -> list[tf.Tensor]:
    """Batches of keys in [0, rows), uniform or by a Zipf law; a permutation spreads the frequent ones."""
    rng = np.random.default_rng([rows, round(100 * skew), seed])
    spread = np.random.default_rng(3).permutation(rows)
    batches = []
    for _ in range(count):
        if skew:
            u = rng.random(keys)
            ranks = (1 - u * (1 - float(rows) ** (1 - skew))) ** (1 / (1 - skew))
            drawn = np.minimum(rows, ranks.astype(np.int64)) - 1
        else:
            drawn = rng.integers(0, rows, keys)
        batches.append(tf.constant(spread[drawn]))
    return batches


def measure(
    what: str, dim: int, law: str, share: float, stores: dict[str, Store], batches: Sequence[tf.Tensor], sizes: Sizes
) -> Point:
    """All stores take turns with the same batches, window by window."""
    steps = {name: getattr(store, what) for name, store in stores.items()}
    for step in steps.values():
        for number in range(sizes.warm):
            step(batches[-1 - number % len(batches)])
    before = {name: store.counts() for name, store in stores.items()}
    ms: dict[str, list[float]] = {name: [] for name in stores}
    for window in range(sizes.windows):
        for name in list(stores)[:: -1 if window % 2 else 1]:  # each first as often as the other
            begin = time.perf_counter()
            for i in range(sizes.steps):
                steps[name](batches[(window * sizes.steps + i) % len(batches)])
            ms[name].append(1e3 * (time.perf_counter() - begin) / sizes.steps)
    numbers = range(sizes.windows * sizes.steps)
    distinct = sum(len(np.unique(batches[number % len(batches)])) for number in numbers)
    come = {
        name: {what: count - before[name][what] for what, count in store.counts().items()}
        for name, store in stores.items()
    }
    of_file = come.get("file", {"hits": 0, "misses": 0, "reads": 0})
    changed = distinct * 8 * dim if what == "train" else 0
    return Point(
        what,
        dim,
        law,
        share,
        ms,
        of_file["hits"] / max(1, of_file["hits"] + of_file["misses"]),
        {name: counts["reads"] / distinct for name, counts in come.items()},
        {name: counts["bytes_written"] / changed for name, counts in come.items()} if changed else {},
        of_file["reads"] / (1e-3 * sizes.steps * sum(ms.get("file", [1.0]))),
    )


class Bench:
    """Makes stores, and tells what they do."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.sizes, self.folder = sizes, folder
        self.is_direct = file_system(folder) not in ("tmpfs", "ramfs")
        self.missing = ""

    def tell(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def rocksdb(self, dim: int, memory_bytes: int) -> Iterator[dict[str, Store]]:
        """The database of this dim, if there is RocksDB."""
        try:
            store = RocksDB(dim, self.folder / f"rocksdb{dim}", memory_bytes, self.is_direct)
        except Unavailable as reason:
            self.missing = str(reason)
            yield {}
            return
        try:
            yield {"RocksDB": store}
        finally:
            store.close()

    def points(self, dim: int, shares: Sequence[float], laws: Sequence[str]) -> Iterator[Point]:
        rows = self.sizes.rows
        memory, mapped = Table(dim, rows, f"memory{dim}"), Mapped(dim, self.folder / f"mapped{dim}", rows)
        with self.rocksdb(dim, 2**30) as made:
            for first in range(0, rows, _AT_ONCE):
                part = memory.rows(first, min(_AT_ONCE, rows - first))
                for store in (mapped, *made.values()):
                    store.fill(part, first)
            for store in made.values():
                store.settle()
        for share in shares:
            tier, memory_bytes = over_a_file(dim, rows, share, self.folder, f"file{dim}_{share}")
            self.tell(f"{tier.describe()}; dim {dim}")
            with self.rocksdb(dim, memory_bytes) as made:
                stores: dict[str, Store] = {"memory": memory, "file": tier, **made, "mmap": mapped}
                has = tier.table.stats()["cache_rows"] / rows
                for law in laws:
                    for seed, what in enumerate(("lookup", "train")):
                        count = self.sizes.windows * self.sizes.steps + self.sizes.warm  # none comes twice
                        batches = batches_of(rows, self.sizes.keys, LAWS[law], count, seed)
                        yield measure(what, dim, law, has, stores, batches, self.sizes)
            del tier, stores


HEADER = (
    "| what | dim | keys | cache, % of rows | memory, ms | file, ms | RocksDB, ms | mmap, ms "
    "| file / memory (quartiles) | RocksDB / file (quartiles) | hit rate "
    "| reads a key: file, RocksDB | bytes written a byte: file, RocksDB |"
)


def line_of(point: Point) -> str:
    """A point as a line of the table."""
    times = [f"{np.median(point.ms[store]):.2f}" if store in point.ms else "" for store in STORES]

    def both(of: dict[str, float]) -> str:
        return ", ".join(f"{of[store]:.2f}" for store in ("file", "RocksDB") if store in of)

    cells = [point.what, point.dim, point.law, f"{100 * point.share:.1f}", *times, point.quotient("file", "memory")]
    cells += [point.quotient("RocksDB", "file"), f"{point.hit_rate:.3f}", both(point.reads_per_key)]
    return f"| {' | '.join(map(str, cells))} | {both(point.write_amplification)} |"


def _measure_ahead(bench: Bench, args: argparse.Namespace) -> None:
    bench.tell(f"ahead by {args.ahead}, keys by {args.laws[0]}, cache of {args.shares[0]:g} % of the rows")
    batches, lines = functools.partial(batches_of, args.rows, args.keys, LAWS[args.laws[0]]), []
    sizes = (args.windows, args.steps, args.warm, args.ahead)
    dense = [*((ms, 0.0) for ms in args.dense), *((0.0, ms) for ms in args.wait)]
    for point in storage_ahead.points(args.dims, dense, args.rows, args.shares[0] / 100, bench.folder, batches, *sizes):
        lines.append(point.line())
        bench.tell(lines[-1])
    bench.tell("\n".join(["", storage_ahead.HEADER, "|---" * (storage_ahead.HEADER.count("|") - 1) + "|", *lines, ""]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1, 5, 20], help="of the rows in the cache, in percent"
    )
    parser.add_argument("--laws", nargs="+", choices=list(LAWS), default=list(LAWS))
    parser.add_argument("--keys", type=int, default=16_384, help="of a batch")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of a window")
    parser.add_argument("--warm", type=int, default=24, help="steps before the first window")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="folder of the files")
    parser.add_argument(
        "--ahead", type=int, default=0, metavar="DEPTH", help="measure reading ahead by so many batches"
    )
    parser.add_argument(
        "--dense", type=float, nargs="+", default=[0, 20], help="ms of computing in a step, with --ahead"
    )
    parser.add_argument("--wait", type=float, nargs="+", default=[20], help="ms of waiting in a step, with --ahead")
    parser.add_argument("--out", type=Path, help="folder for storage.json and storage.png")
    args = parser.parse_args(arguments)
    sok.Init(seed=1)
    args.path.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="sok_storage_", dir=args.path))
    bench = Bench(Sizes(args.rows, args.keys, args.windows, args.steps, args.warm), folder)
    about = {**describe(), "file_system": file_system(folder), "rows": args.rows, "keys": args.keys}
    try:
        bench.tell(
            f"{about['cpu']}, {about['usable_cores']} cores, {about['file_system']}, load {os.getloadavg()[0]:.1f}, "
            f"{args.rows:,} rows, {args.keys:,} keys, {args.windows} windows of {args.steps} steps"
        )
        if args.ahead:
            return _measure_ahead(bench, args)
        points, lines = [], []
        for dim in args.dims:
            for point in bench.points(dim, [share / 100 for share in args.shares], args.laws):
                points.append(point)
                lines.append(line_of(point))
                bench.tell(lines[-1])
        bench.tell("\n".join(["", HEADER, "|---" * (HEADER.count("|") - 1) + "|", *lines, ""]))
        if bench.missing:
            bench.tell(f"without RocksDB: {bench.missing}")
        reads, who = random_reads(folder, 8 * args.rows * max(args.dims))
        most = max(points, key=lambda point: point.reads_per_second)
        bench.tell(f"the disk by itself: {reads:,.0f} random reads a second ({who})")
        bench.tell(
            f"the table read up to {most.reads_per_second:,.0f} rows a second, of a block by one read, in whole steps "
            f"({most.what}, dim {most.dim}, {most.law}, cache {100 * most.share:.1f} %)"
        )
        about["random_reads"] = reads
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.out:
        from benchmarks import storage_chart

        args.out.mkdir(parents=True, exist_ok=True)
        figures = {"about": about, "points": [dataclasses.asdict(point) for point in points]}
        (args.out / "storage.json").write_text(json.dumps(figures, indent=1))
        storage_chart.write(about, points, args.out / "storage.png")


if __name__ == "__main__":
    main()
