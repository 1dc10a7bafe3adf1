"""What is not a race of steps: memory and growth of one table, and what starting costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks import machine, workloads
from benchmarks.statistics import quantile
from benchmarks.workloads import ROOT

_STEP_KEYS = 16_384

# Each in a fresh process. The first line is TensorFlow's share, which everybody pays.
_IMPORT = """
import time
import tensorflow
start = time.perf_counter()
import sok
sok.Init
from sok.base import _ops
_ops.lib()
print(time.perf_counter() - start)
"""

_TRACING = """
import json, time
import tensorflow as tf
from benchmarks.contestants import ours, tensors
import sok
sok.Init(seed=1)
tables = [sok.EmbeddingVariable(16, 1000, name=f"table{t}") for t in range(26)]
rule = sok.optimizers.Adagrad(0.01)
upstream = tensors.gradients_for([[64, 16]] * 26)

@tf.function
def step(*flat):
    with tf.GradientTape() as tape:
        outputs = ours.pooled(tables, tensors.as_ragged(flat), "sum", training=True)
    rule.apply_gradients(zip(tape.gradient(outputs, tables, output_gradients=upstream), tables))

flat = [tf.range(64, dtype=tf.int64), tf.range(65, dtype=tf.int64)] * 26
start = time.perf_counter()
step(*flat)
first = time.perf_counter() - start
step(*flat)
start = time.perf_counter()
step(*flat)
print(first - (time.perf_counter() - start))
"""


def memory(rows: int, dim: int) -> dict[str, Any]:
    """Inserts `rows` keys, a batch at a time: bytes per key beside the record, and the longest step."""
    import tensorflow as tf

    import sok
    from sok.lookup.lookup import lookup_rows

    # Read once before, so that threads and buffers of TensorFlow are not counted as the table's.
    other = sok.EmbeddingVariable(dim, 4 * _STEP_KEYS, name="warm")
    insert_into = tf.function(
        lambda table, keys: tf.reduce_sum(lookup_rows(table, keys, training=True)[:, 0]), reduce_retracing=False
    )
    for i in range(4):
        insert_into(other, tf.constant(workloads.scattered_keys(i * _STEP_KEYS, (i + 1) * _STEP_KEYS)))
    # No more room than is needed: what a capacity costs in advance is in the figure, too.
    table = sok.EmbeddingVariable(dim, rows, name="grown")
    insert = tf.function(lambda keys: lookup_rows(table, keys, training=True)[0, 0])
    insert(tf.constant(workloads.scattered_keys(0, _STEP_KEYS)))
    before = machine.rss_bytes() - _STEP_KEYS * (4 * dim + 16)
    seconds, processor = [], []
    for first in range(_STEP_KEYS, rows, _STEP_KEYS):
        keys = tf.constant(workloads.scattered_keys(first, min(rows, first + _STEP_KEYS)))
        cpu, start = os.times(), time.perf_counter()
        insert(keys)
        seconds.append(time.perf_counter() - start)
        after = os.times()
        processor.append(after.user + after.system - cpu.user - cpu.system)
    grown = machine.rss_bytes() - before
    assert int(table.size()) == rows
    return {
        "bytes_per_key": round(grown / rows, 2),
        "record_bytes": 4 * dim,
        "overhead_bytes_per_key": round(grown / rows - 4 * dim, 2),
        "longest_step_ms": round(1e3 * max(seconds), 2),
        "longest_step_cpu_ms": round(1e3 * max(processor), 2),
        "step_p999_ms": round(1e3 * quantile(seconds, 0.999), 2),
        "step_median_ms": round(1e3 * quantile(seconds, 0.5), 3),
        "keys_per_step": _STEP_KEYS,
        "insert_keys_per_s": round((rows - _STEP_KEYS) / float(np.sum(seconds))),
    }


def startup(repeats: int = 5) -> dict[str, Any]:
    """Seconds of `import sok` and loading its library beyond TensorFlow's, and of the first step over 26 tables."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}

    def run(code: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
        )
        return float(done.stdout.split()[-1])

    imports, tracings = [run(_IMPORT) for _ in range(repeats)], [run(_TRACING) for _ in range(max(1, repeats // 2))]
    return {
        "import_s": round(quantile(imports, 0.5), 3),
        "import_worst_s": round(max(imports), 3),
        "tracing_s": round(quantile(tracings, 0.5), 3),
        "repeats": repeats,
    }
