"""python -m benchmarks.versions: what saves of a table over a file cost the steps beside them, and restoring.

A table of Adagrad over a file; each step has new keys by a Zipf law of exponent 1.05. Windows of steps take turns: one
without a save, one that begins a save by version, one that begins an asynchronous save of all rows. Printed are for
each the median and the 99th percentile of its steps, their quotients to those without a save (the median and the
quartiles over rounds), how long the call of the save took and how long until it was complete, and bytes written. Last,
rows a second that a restore of a version reads, and that of an ordinary save of the same rows.

--path is the folder of all files: on a disk, or on tmpfs (/dev/shm). docs/storage.md has figures.
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
import sok.checkpoint.versions
from benchmarks.machine import describe
from benchmarks.storage import batches_of
from benchmarks.stores.disk import file_system
from benchmarks.stores.tables import Table

HOW = ("no save", "version", "all rows")
# Rows are counted, and none leaves: a pass takes the time that benchmarks.policies measures.
_POLICIES = {"eviction": sok.Eviction(older_than=10**8, every=10**8)}
_KINDS: dict[str, dict[str, bool]] = {"version": {"versions": True}, "all rows": {}}


class Bench:
    """One table, and the windows of steps that it trains."""

    def __init__(self, folder: Path, rows: int, dim: int, share: float, keys: int, policies: bool = False) -> None:
        self._folder, self._rows, self._keys, self._seed = folder, rows, keys, 0
        # Keys, places, what versions need of each row, and of the share that has room in memory the records.
        memory_bytes = int(44 * rows + share / 100 * rows * (8 * dim + 40)) + 2**22
        storage = sok.Storage(memory_bytes=memory_bytes + (16 * rows if policies else 0), path=folder / "rows")
        self.table = Table(dim, rows, "saved", storage, **(_POLICIES if policies else {}))
        sok.checkpoint.versions.prepare([self.table.table])
        self.saving: dict[str, list[tuple[float, float, int]]] = {how: [] for how in HOW[1:]}

    def window(self, how: str, steps: int) -> list[float]:
        """Milliseconds of each step, of which a save begins before the first."""
        self._seed += 1
        batches = batches_of(self._rows, self._keys, 1.05, steps, self._seed)
        going_on, before = None, self.table.counts()["bytes_written"]
        begun = time.perf_counter()
        if how != "no save":
            going_on = sok.save(self._folder / how, self.table.table, asynchronous=True, **_KINDS[how])
        called = time.perf_counter()
        times: list[float] = []
        complete = 0.0
        for batch in batches:
            start = time.perf_counter()
            self.table.train(batch)
            times.append(1e3 * (time.perf_counter() - start))
            if going_on is not None and not complete and going_on.done():
                complete = time.perf_counter()
        if going_on is not None:
            going_on.result()
            log = self.table.counts()["bytes_written"] - before
            files = sum(file.stat().st_size for file in (self._folder / how).glob("*.shard"))
            self.saving[how].append((called - begun, (complete or time.perf_counter()) - begun, log + files))
        return times

    def restored(self, how: str) -> float:
        """Rows a second that `sok.restore` reads into a table in memory."""
        fresh = sok.EmbeddingVariable(
            self.table.table.dim, self._rows, name=f"restored_{how.replace(' ', '_')}", seed=1
        )
        begin = time.perf_counter()
        sok.restore(self._folder / how, {self.table.table.table_name: fresh}, progress=False)
        return self._rows / (time.perf_counter() - begin)


def quartiles(values: Any) -> str:
    low, middle, high = np.percentile(np.array(values), [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__.split("\n\n")[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="where all files are (default: the system's)")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cache", type=float, default=5.0, help="percent of the rows that have room (default 5)")
    parser.add_argument("--keys", type=int, default=8_192, help="of a step")
    parser.add_argument("--steps", type=int, default=100, help="of a window")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--policies", action="store_true", help="rows have histories, which each step counts")
    options = parser.parse_args(arguments)
    machine = describe()
    print(f"{machine['cpu']}, {machine['cores']} cores; {file_system(Path(options.path))}; TensorFlow {tf.__version__}")
    counted = ", with histories" if options.policies else ""
    print(f"{options.rows:,} rows of dim {options.dim} and their accumulators{counted}, {options.cache:g} % in memory")
    sok.Init()
    folder = Path(tempfile.mkdtemp(prefix="sok_versions_", dir=options.path))
    try:
        bench = Bench(folder, options.rows, options.dim, options.cache, options.keys, options.policies)
        print(bench.table.describe())
        for how in HOW:
            bench.window(how, 10)
        bench.saving = {how: [] for how in HOW[1:]}
        rounds = [{how: bench.window(how, options.steps) for how in HOW} for _ in range(options.rounds)]
        for how in HOW:
            middle = [np.median(one[how]) / np.median(one["no save"]) for one in rounds]
            late = [np.percentile(one[how], 99) / np.percentile(one["no save"], 99) for one in rounds]
            every = np.concatenate([one[how] for one in rounds])
            print(
                f"{how:8}: median {np.median(every):.2f} ms, {quartiles(middle)} of no save; 99th percentile "
                f"{np.percentile(every, 99):.2f} ms, {quartiles(late)} of no save"
            )
        for how, found in bench.saving.items():
            call, complete, written = np.median(np.array(found), 0)
            print(
                f"{how:8}: the call {1e3 * call:.2f} ms, complete after {complete:.2f} s, {written:,.0f} bytes written"
            )
        sok.save(folder / "ordinary", bench.table.table)
        sok.save(folder / "version", bench.table.table, versions=True)
        for how in ("version", "ordinary", "version", "ordinary"):
            print(f"restore of {how:8}: {bench.restored(how):,.0f} rows a second")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
