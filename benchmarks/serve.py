"""Requests a second and latency of `sok serve`, and what a swap of versions costs: python -m benchmarks.serve.

Exports one hashed table with a head, in stock ops and natively, serves each by `sok serve` in a process of its own, and
lets clients in another one ask. Prints a table in Markdown: of rounds that take turns, the median and the quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import sok
from benchmarks import machine
from benchmarks.serving import SPEC, OneTable, fill, ids_of
from benchmarks.statistics import quantile

CASES = ((1, 1), (1, 4), (100, 1), (100, 4), (1000, 4))  # samples of a request, clients
EXPORTS = {"stock": {}, "native": {"native": True}}


@dataclasses.dataclass(frozen=True)
class Round:
    """What one run of the clients has measured."""

    requests_per_s: float
    median_ms: float
    p99_ms: float

    @staticmethod
    def of(told: dict) -> Round:
        if told["bad"]:
            raise RuntimeError(f"{len(told['bad'])} requests had no answer: {told['bad'][0]}")
        times = [1e3 * seconds for seconds in told["times"]]
        return Round(len(times) / told["wall"], quantile(times, 0.5), quantile(times, 0.99))


class Served:
    """`sok serve` of a folder of versions, which holds one."""

    def __init__(self, export: Path, folder: Path) -> None:
        self.export, self.folder, self.version = export, folder, 0
        self.publish()
        command = [sys.executable, "-m", "sok", "serve", str(folder), "--name", "m", "--port", "0"]
        more = ["--poll-seconds", "0.1"]
        self.process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said = self.process.stdout.readline()
        if not said:
            raise RuntimeError(f"{' '.join(command)} ended with {self.process.wait()}")
        self.url = f"{said.split()[0]}/m:predict"

    def publish(self) -> None:
        self.version += 1
        partial = self.folder / "partial"
        shutil.copytree(self.export, partial)
        partial.rename(self.folder / str(self.version))

    def ask(self, bodies: Path, clients: int, seconds: float) -> Round:
        command = [sys.executable, "-m", "benchmarks.serve_load", self.url, str(bodies)]
        more = ["--clients", str(clients), "--seconds", str(seconds)]
        return Round.of(json.loads(subprocess.run([*command, *more], capture_output=True, check=True).stdout))

    def ask_across_swaps(self, bodies: Path, clients: int, seconds: float) -> Round:
        """The same, while a new version appears each second."""
        stop = threading.Event()

        def publish() -> None:
            while not stop.wait(1.0):
                self.publish()

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            return self.ask(bodies, clients, seconds)
        finally:
            stop.set()
            thread.join()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def write_bodies(path: Path, keys: np.ndarray, batch: int, rng: np.random.Generator) -> Path:
    """Some different requests of so many samples each."""
    requests = [{"inputs": ids_of(keys, batch, 0.01, rng).numpy().tolist()} for _ in range(20)]
    path.write_text("\n".join(map(json.dumps, requests)))
    return path


def cells(rounds: list[Round]) -> str:
    rates = [one.requests_per_s for one in rounds]
    low, middle, high = (quantile(rates, q) for q in (0.25, 0.5, 0.75))
    median, p99 = (quantile([getattr(one, name) for one in rounds], 0.5) for name in ("median_ms", "p99_ms"))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f}) | {median:.2f} | {p99:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sok.Init()
    rng = np.random.default_rng(1)
    model = OneTable(options.rows, options.dim)
    keys = fill(model, options.rows, rng)
    described = machine.describe()
    print(f"{described['cpu']}, {described['usable_cores']} cores, TensorFlow {tf.__version__}, {time.strftime('%F')}")
    print(
        f"{options.rows:,} rows x {options.dim} floats, 26 features of one id; server and clients on the same "
        f"cores; {options.rounds} rounds of {options.seconds:g} s\n"
    )
    print("| export | samples | clients | requests/s, median (quartiles) | latency, median ms | 99th percentile |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        served = {}
        try:
            for name, more in EXPORTS.items():
                sok.export_saved_model(model, root / "exports" / name, signatures=SPEC, **more)
                (root / name).mkdir()
                served[name] = Served(root / "exports" / name, root / name)
            for batch, clients in CASES:
                bodies = write_bodies(root / "bodies", keys, batch, rng)
                rounds = [
                    {name: one.ask(bodies, clients, options.seconds) for name, one in served.items()}
                    for _ in range(options.rounds)
                ]
                for name in EXPORTS:
                    print(f"| {name} | {batch:,} | {clients} | {cells([of[name] for of in rounds])} |", flush=True)
            bodies = write_bodies(root / "bodies", keys, 1, rng)
            for name, one in served.items():
                before = one.version
                rounds = [one.ask_across_swaps(bodies, 4, options.seconds) for _ in range(options.rounds)]
                print(f"| {name}, {one.version - before} swaps | 1 | 4 | {cells(rounds)} |", flush=True)
        finally:
            for one in served.values():
                one.close()


if __name__ == "__main__":
    main()
