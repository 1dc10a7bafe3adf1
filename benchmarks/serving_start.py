"""How fast a native export starts, and what several servers of it share: python -m benchmarks.serving_start.

Exports one hashed table natively and in stock ops. Then, for each, processes without sok load it and look up a batch,
one after the other while the others stay alive; each says how long it took from `tf.saved_model.load` to the first
answer, and, when all are up, its share of memory (Pss: a page that k processes map counts 1/k in each).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import sok
from benchmarks import machine

_SERVER = """
import glob, json, sys, time
import tensorflow as tf
folder, seed, batch, num_rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
assert "sok" not in sys.modules
libraries = glob.glob(folder + "/assets.extra/libsok_serving.so")
if libraries:
    tf.load_op_library(libraries[0])
ids = tf.random.stateless_uniform([batch], [seed, 1], 0, num_rows, tf.int64) * 7919
def memory():
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}
before = memory()["Pss"]
start = time.perf_counter()
serve = tf.saved_model.load(folder).signatures["serving_default"]
loaded = time.perf_counter() - start
answer = next(iter(serve(ids=ids).values())).numpy()
answered = time.perf_counter() - start
print(json.dumps({"load_s": loaded, "first_answer_s": answered, "sum": float(answer.sum())}), flush=True)
sys.stdin.readline()
print(json.dumps({"pss_kb": memory()["Pss"] - before}), flush=True)
sys.stdin.readline()
"""


class Rows(tf.Module):
    """The rows of ids [n]."""

    def __init__(self, table: sok.EmbeddingVariable) -> None:
        super().__init__()
        self.table = table

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        return sok.group_embedding_lookup([self.table], [ids], training=False)[0]


def fill(table: sok.EmbeddingVariable, num_rows: int) -> None:
    """Keys 0, 7919, 2 x 7919, ..."""
    rng = np.random.default_rng(1)
    for first in range(0, num_rows, 1 << 19):
        keys = np.arange(first, min(first + (1 << 19), num_rows)) * 7919
        table.assign(keys, rng.random((len(keys), table.dim), np.float32))


def serve(folder: Path, processes: int, batch: int, num_rows: int) -> list[dict[str, float]]:
    """What each process says."""
    started = []
    said = []
    try:
        for number in range(processes):
            arguments = [str(folder), str(number), str(batch), str(num_rows)]
            command = [sys.executable, "-c", _SERVER, *arguments]
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    cwd="/",
                )
            )
            said.append(json.loads(started[-1].stdout.readline()))
        for one, process in zip(said, started, strict=True):
            process.stdin.write("\n")
            process.stdin.flush()
            one.update(json.loads(process.stdout.readline()))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="of rows")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--folder", help="where the export goes; default: a temporary one")
    options = parser.parse_args()
    sok.Init()
    num_rows = int(options.gb * 1e9 / (4 * options.dim))
    table = sok.EmbeddingVariable(options.dim, num_rows, name="start")
    fill(table, num_rows)
    described = machine.describe()
    print(f"{described['cpu']}, {described['usable_cores']} cores, TensorFlow {tf.__version__}, {time.strftime('%F')}")
    print(f"{num_rows:,} rows x {options.dim} floats, {options.processes} processes, batch {options.batch:,}\n")
    print("| export | took | process | load | first answer after | its share of memory |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind in ("native", "stock"):
            path, start = Path(folder, kind), time.perf_counter()
            signature = tf.TensorSpec([None], tf.int64, "ids")
            sok.export_saved_model(Rows(table), path, signatures=signature, native=kind == "native")
            took = time.perf_counter() - start
            for number, one in enumerate(serve(path, options.processes, options.batch, num_rows)):
                print(
                    f"| {kind} | {took:.1f} s | {number + 1} | {one['load_s']:.2f} s | {one['first_answer_s']:.2f} s | "
                    f"{one['pss_kb'] / 1024:,.0f} MiB |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
