#!/usr/bin/env python3
"""Rows in Redis: exports a model to servers of its own, answers from them, and takes the servers away.

python examples/redis_serving.py --check

Prints one line of JSON: what was compared with the native export, what failed while a server was away, and whether an
answer was ever wrong. Ends with 1 if one was. Needs redis-server and redis-cli, and `pip install 'sok[redis]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import redis_servers

DEADLINE_MS, CLUSTER_DEADLINE_MS = 1000, 4000
SPEC = tf.TensorSpec([None, 3], tf.int64, name="ids")


class Model(tf.Module):
    """Two tables, looked up as one group, and a dense layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = [sok.EmbeddingVariable(8, rows, name=name, initializer="uniform") for name in ("user", "item")]
        self.weights = tf.Variable(tf.random.stateless_normal([16, 1], [1, 2]))
        self.keys = np.arange(rows // 2) * 7919

    def train(self, step: int) -> None:
        """All rows and weights change, as if trained."""
        for number, table in enumerate(self.tables):
            rng = np.random.default_rng(10 * step + number)
            table.assign(self.keys, rng.normal(size=(len(self.keys), 8)).astype(np.float32))
        self.weights.assign(tf.random.stateless_normal([16, 1], [step, 2]))

    def __call__(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        pooled = sok.group_embedding_lookup_sparse(self.tables, [ids, ids], "sum", training=False)
        rows = tf.concat(pooled, axis=1)
        return {"click": tf.sigmoid(rows @ self.weights), "rows": rows}


def load(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    served = tf.saved_model.load(path).signatures["serving_default"]

    def answer(ids: np.ndarray) -> np.ndarray:
        outputs = served(ids=tf.constant(ids))
        return np.concatenate([outputs["click"], outputs["rows"]], axis=1)

    return answer


class Asking:
    """Threads that ask the served version all the time, and compare each answer with the native export's."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches = batches
        self.versions: list[tuple[Callable[[np.ndarray], np.ndarray], list[np.ndarray]]] = []
        self.right = self.wrong = 0
        self.errors: dict[str, int] = {}
        self.slowest_ms = 0.0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(3)]

    def serve(self, of_redis: Path, native: Path) -> None:
        """A new version takes over, as in a server: requests that have begun end with the old one."""
        of_files = load(native)
        self.versions.append((load(of_redis), [of_files(batch) for batch in self._batches]))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def during(self, seconds: float) -> dict[str, Any]:
        """What became of the requests of the next seconds."""
        with self._lock:
            self.errors, self.slowest_ms, before = {}, 0.0, self.right
        time.sleep(seconds)
        with self._lock:
            told = {"right": self.right - before, "errors": dict(self.errors), "slowest_ms": round(self.slowest_ms)}
        print(told, file=sys.stderr, flush=True)
        return told

    def until_right(self) -> float:
        """Seconds until a request is answered again."""
        before = self.right
        return round(redis_servers.until(lambda: self.right > before, 60, "requests are answered again"), 2)

    def _ask(self, number: int) -> None:
        rng = np.random.default_rng(number)
        while not self._stop.is_set():
            answer, expected = self.versions[-1]
            chosen = int(rng.integers(len(self._batches)))
            start, error = time.perf_counter(), ""
            try:
                is_right = np.array_equal(answer(self._batches[chosen]), expected[chosen])
            except tf.errors.OpError as failed:
                error = type(failed).__name__
            with self._lock:
                self.slowest_ms = max(self.slowest_ms, 1e3 * (time.perf_counter() - start))
                if error:
                    self.errors[error] = self.errors.get(error, 0) + 1
                elif is_right:
                    self.right += 1
                else:
                    self.wrong += 1
            if error:
                time.sleep(0.02)


def check_one(model: Model, batches: list[np.ndarray], folder: Path, told: dict[str, Any]) -> Asking:
    """One server, behind a link that can be cut."""
    asking = Asking(batches)
    with redis_servers.servers(1) as (server,):
        link = redis_servers.Link(server)
        url = f"redis://{server.address}/0?prefix=one&timeout_ms={DEADLINE_MS}&cache_bytes=0&grace_seconds=3"
        os.environ["SOK_REDIS_ADDRESS"] = link.address  # the model's servers reach Redis by another way than its writer
        export(model, folder / "1", url)
        asking.serve(folder / "1", folder / "1.native")
        asking.start()
        try:
            told["whole"] = asking.during(1)
            server.stop()
            told["stopped"] = asking.during(2.5)
            server.go_on()
            told["stopped"]["seconds_until_right"] = asking.until_right()
            link.close()
            told["network_cut"] = asking.during(2.5)
            link.open()
            told["network_cut"]["seconds_until_right"] = asking.until_right()
            model.train(2)
            export(model, folder / "2", url)  # while requests run, of which each sees one version
            asking.serve(folder / "2", folder / "2.native")
            told["new_version"] = asking.during(4)  # the grace of the old one ends in it
            server.kill()
            told["killed"] = asking.during(2.5)
            server.start()  # without its data
            told["back_without_data"] = asking.during(1)
            export(model, folder / "3", url)
            asking.serve(folder / "3", folder / "3.native")
            told["back_without_data"]["seconds_until_right_after_export"] = asking.until_right()
        finally:
            asking.end()
            link.close()
            del os.environ["SOK_REDIS_ADDRESS"]
    return asking


def check_cluster(model: Model, batches: list[np.ndarray], folder: Path, told: dict[str, Any]) -> Asking:
    """Three primaries and a replica of each."""
    asking = Asking(batches)
    with redis_servers.cluster(3, 1) as nodes:
        url = (
            f"redis://{nodes[0].address},{nodes[1].address}?prefix=many&timeout_ms={CLUSTER_DEADLINE_MS}&cache_bytes=0"
        )
        export(model, folder / "4", url)
        asking.serve(folder / "4", folder / "4.native")
        asking.start()
        try:
            told["cluster_whole"] = asking.during(2)
            nodes[4].kill()
            told["replica_killed"] = asking.during(1)
            nodes[0].stop()
            told["primary_stopped"] = asking.during(4)
            nodes[0].go_on()
            nodes[2].kill()
            told["primary_killed"] = asking.during(4)
            model.train(3)
            export(model, folder / "5", url)
            asking.serve(folder / "5", folder / "5.native")
            told["new_version_on_what_is_left"] = asking.during(1)
            nodes[1].kill()  # the one without a replica
            told["shard_lost"] = asking.during(6)
        finally:
            asking.end()
    return asking


def export(model: Model, path: Path, url: str) -> None:
    """The same model twice: rows in Redis, and in files."""
    sok.export_saved_model(model, f"{path}.native", signatures=SPEC, native=True)
    sok.export_saved_model(model, path, signatures=SPEC, rows=url)


def check(rows: int) -> int:
    sok.Init(seed=1)
    model = Model(rows)
    model.train(1)
    rng = np.random.default_rng(0)
    batches = [rng.choice(np.append(model.keys, rng.integers(0, 1 << 62, 50)), [50, 3]) for _ in range(8)]
    told: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        asked = [check_one(model, batches, folder, told), check_cluster(model, batches, folder, told)]
    finally:
        shutil.rmtree(folder)
    wrong = sum(one.wrong for one in asked)
    quiet = ("whole", "new_version", "cluster_whole", "replica_killed", "primary_stopped", "primary_killed")
    lost = sum(sum(told[name]["errors"].values()) for name in (*quiet, "new_version_on_what_is_left"))
    slowest = max(one["slowest_ms"] for one in told.values())
    compared = sum(one.right for one in asked) + wrong
    print(
        json.dumps(
            {
                "equal": wrong == 0,
                "compared": compared,
                "wrong": wrong,
                "lost_where_it_should_not": lost,
                "deadline_ms": [DEADLINE_MS, CLUSTER_DEADLINE_MS],
                "slowest_ms": slowest,
                **told,
            }
        )
    )
    return 0 if wrong == 0 and lost == 0 and compared > 100 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, kill, and print one line of JSON")
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    if redis_servers.missing():
        print(redis_servers.missing(), file=sys.stderr)
        return 1
    if not options.check:
        parser.print_help()
        return 0
    return check(options.rows)


if __name__ == "__main__":
    sys.exit(main())
