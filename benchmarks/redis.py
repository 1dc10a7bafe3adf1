"""Rows in Redis beside stock and mapped exports: python -m benchmarks.redis. Needs redis-server and redis-cli.

One hashed table with a head, exported in stock ops, natively, and to one Redis process and to clusters of 3 and 6,
which run on the same machine. Prints a table in Markdown: latency of calls that take turns, and of some threads
together the requests a second. Without a cache of rows, so that each request goes to Redis; the last line has one that
holds all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks import machine
from benchmarks.serving import SPEC, OneTable, fill, ids_of, in_turns
from examples import redis_servers

BATCHES = (1, 100, 1000)
PROCESSES = (1, 3, 6)


@contextlib.contextmanager
def started(processes: int) -> Iterator[str]:
    """The addresses of a server, or of a cluster of so many primaries."""
    with redis_servers.servers(1) if processes == 1 else redis_servers.cluster(processes) as nodes:
        yield ",".join(node.address for node in nodes)


def requests_per_s(call: Callable[[], Any], threads: int, seconds: float) -> float:
    """Of threads that ask without a pause."""
    counts, stop = [0] * threads, threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            call()
            counts[number] += 1

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(threads)]
    start = time.perf_counter()
    for thread in asking:
        thread.start()
    time.sleep(seconds)
    stop.set()
    for thread in asking:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--unseen", type=float, default=0.01, help="share of ids without a row")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each case")
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    sok.Init()
    rng = np.random.default_rng(1)
    model = OneTable(options.rows, options.dim)
    keys = fill(model, options.rows, rng)
    described = machine.describe()
    print(f"{described['cpu']}, {described['usable_cores']} cores, TensorFlow {tf.__version__}, {time.strftime('%F')}")
    print(f"{options.rows:,} rows x {options.dim} floats, 26 features of one id, {options.unseen:.0%} unseen\n")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        kinds: dict[str, dict[str, Any]] = {"stock": {}, "mapped": {"native": True}}
        for processes in PROCESSES:
            url = f"redis://{running.enter_context(started(processes))}?prefix=bench&timeout_ms=60000"
            kinds[f"Redis, {processes}"] = {"rows": f"{url}&cache_bytes=0"}
        kinds[f"Redis, {PROCESSES[-1]}, all in the cache"] = {
            "rows": f"{url.replace('=bench', '=cached')}&cache_bytes=1GiB"
        }
        served, took = {}, {}
        for number, (name, more) in enumerate(kinds.items()):
            start = time.perf_counter()
            with contextlib.redirect_stdout(None):
                sok.export_saved_model(model, f"{folder}/{number}", signatures=SPEC, **more)
            took[name] = time.perf_counter() - start
            served[name] = tf.saved_model.load(f"{folder}/{number}").signatures["serving_default"]
        cells: dict[str, list[str]] = {name: [f"{seconds:.1f} s"] for name, seconds in took.items()}
        for batch in BATCHES:
            ids = ids_of(keys, batch, options.unseen, rng)
            calls = {name: functools.partial(_answer, function, ids) for name, function in served.items()}
            for name in calls:
                np.testing.assert_allclose(calls[name](), calls["mapped"](), rtol=0, atol=1e-5)
            for name, times in in_turns(calls, options.seconds * len(calls)).items():
                cells[name].append(f"{np.median(times):.2f} / {np.percentile(times, 99):.2f}")
            for name, call in calls.items():
                cells[name].append(f"{requests_per_s(call, options.threads, options.seconds):,.0f}")
    columns = [f"{batch:,}: ms | {batch:,}: requests/s" for batch in BATCHES]
    print(f"| rows in | export | {' | '.join(columns)} |")
    print("|---|" + "---|" * (1 + 2 * len(BATCHES)))
    for name, of_kind in cells.items():
        print(f"| {name} | {' | '.join(of_kind)} |")


def _answer(function: Callable[..., Any], ids: tf.Tensor) -> np.ndarray:
    return next(iter(function(ids=ids).values())).numpy()


if __name__ == "__main__":
    main()
