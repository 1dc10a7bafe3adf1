#!/usr/bin/env python3
"""One feed: a job trains and publishes, exports follow it, and both are killed meanwhile.

python examples/feed.py --check

The job publishes twice a second. `sok follow` makes versions of the exported model, and threads of this program follow
in tables of their own. In the step number N all rows and all dense weights are N, so whoever shows two steps at once is
found out. Prints one line of JSON: how many versions and answers were looked at, which were wrong (none), what was
killed, and how old what was served was at most. Ends with 1 if an answer was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

import sok

KEYS = np.arange(2000) * 7919
EVERY_SECONDS = 0.5
SPEC = tf.TensorSpec([None, 3], tf.int64, name="ids")


class Model(tf.Module):
    """A table, and dense weights that say what its rows are to be."""

    def __init__(self) -> None:
        super().__init__()
        self.table = sok.EmbeddingVariable(4, 10_000, name="rows", initializer="zeros")
        self.step = tf.Variable([0.0])

    def __call__(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        (mean,) = sok.group_embedding_lookup_sparse([self.table], [ids], "mean", training=False)
        return {"rows": mean, "step": tf.repeat(self.step, tf.shape(ids)[0])}


def train(feed: str, exports: str) -> None:
    """The job: goes on from what it has published before it was killed."""
    model = Model()
    if os.path.exists(f"{feed}/manifest.json"):
        sok.restore(feed, model.table)
        sok.follow(feed, {"rows": model.table}, dense={"step": model.step}).poll()
    publisher = sok.Publisher(feed, model, every_seconds=EVERY_SECONDS, max_chain=20)
    number = int(model.step.numpy()[0])
    while True:
        number += 1
        model.table.assign(KEYS, np.full([len(KEYS), 4], number, np.float32))
        model.step.assign([float(number)])
        if not os.path.exists(f"{exports}/1"):
            sok.export_saved_model(model, f"{exports}/1", signatures=SPEC, native=True)
            publisher.publish()
        publisher.step()
        time.sleep(0.002)


class Watch:
    """What was looked at, by all threads."""

    def __init__(self) -> None:
        self.answers = self.wrong = self.polls = 0
        self.steps: list[float] = []
        self.lag = 0.0
        self.ended = threading.Event()

    def look(self, rows: np.ndarray, steps: np.ndarray) -> None:
        self.answers += len(rows)
        self.wrong += int(np.any(rows != steps[:, None], axis=1).sum())
        self.steps.append(float(steps[0]))

    def answer_from_tables(self, model: Model, follower: Any, seed: int) -> None:
        """One step at a time, while another thread brings newer ones."""
        rng = np.random.default_rng(seed)
        while not self.ended.is_set():
            ids = tf.constant(rng.choice(KEYS, [8, 3]))
            with follower.reading():
                if follower.generation is None:
                    continue
                answer = {name: value.numpy() for name, value in model(ids).items()}
            self.look(answer["rows"], answer["step"])

    def poll(self, follower: Any) -> None:
        while not self.ended.wait(0.1):
            self.polls += follower.poll()
            self.lag = max(self.lag, follower.lag or 0.0)

    def load(self, path: str) -> None:
        """Asks a version of the export."""
        served = tf.saved_model.load(path).signatures["serving_default"]
        answer = served(ids=tf.constant(np.random.default_rng(1).choice(KEYS, [64, 3])))
        self.look(answer["rows"].numpy(), answer["step"].numpy())


def wait_for_versions(exports: str, more: int) -> None:
    """Until so many more are there."""
    wanted, deadline = len(os.listdir(exports)) + more, time.monotonic() + 120
    while len(os.listdir(exports)) < wanted:
        if time.monotonic() > deadline:
            raise SystemExit("no new version has come for two minutes")
        time.sleep(0.1)


def start(*words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds-between", type=float, default=4.0, help="kills come at random within so many")
    parser.add_argument("--kills", type=int, default=6, help="of the job and of `sok follow`, in turn, at random times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="end with 1 if an answer was wrong or nothing came")
    parser.add_argument("--train", nargs=2, metavar=("FEED", "EXPORTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(*args.train)
    folder = tempfile.mkdtemp(prefix="sok_feed_")
    feed, exports = f"{folder}/feed", f"{folder}/exports"
    os.mkdir(exports)
    commands = {"job": (__file__, "--train", feed, exports), "follower": ("-m", "sok", "follow", feed, exports)}
    commands["follower"] += ("--poll-seconds", "0.2", "--max-to-keep", "1000")
    processes = {"job": start(*commands["job"])}
    watch, model, rng = Watch(), Model(), random.Random(args.seed)
    try:
        while not os.path.exists(f"{exports}/1"):
            if processes["job"].poll() is not None:
                raise SystemExit("the job has ended before it had published anything")
            time.sleep(0.1)
        processes["follower"] = start(*commands["follower"])
        follower = sok.follow(feed, {"rows": model.table}, dense={"step": model.step})
        threads = [threading.Thread(target=watch.poll, args=[follower])]
        threads += [threading.Thread(target=watch.answer_from_tables, args=[model, follower, n]) for n in range(2)]
        for thread in threads:
            thread.start()
        wait_for_versions(exports, 3)
        killed = []
        for number in range(args.kills):
            time.sleep(rng.uniform(0.0, args.seconds_between))
            who = ("job", "follower")[number % 2]
            processes[who].send_signal(signal.SIGKILL)
            processes[who].wait()
            begin = time.monotonic()
            processes[who] = start(*commands[who])
            wait_for_versions(exports, 2)  # the first may have been on its way
            killed.append({who: round(time.monotonic() - begin, 1)})
    finally:
        watch.ended.set()
        for process in processes.values():
            process.kill()
            process.wait()
    for thread in threads:
        thread.join()
    versions = sorted((name for name in os.listdir(exports) if name.isdigit()), key=int)
    steps_before = watch.steps
    watch.steps = []
    tf.load_op_library(f"{exports}/1/assets.extra/libsok_serving.so")
    for name in versions:
        watch.load(f"{exports}/{name}")
    said = {
        "answers": watch.answers,
        "wrong": watch.wrong,
        "versions": len(versions),
        "steps_back": sum(a > b for a, b in itertools.pairwise(watch.steps)),
        "saves_taken_up": watch.polls,
        "steps_seen": len(set(steps_before)),
        "killed_and_back_after_seconds": killed,
        "largest_lag_seconds": round(watch.lag, 1),
    }
    print(json.dumps(said))
    is_right = watch.wrong == 0 and said["steps_back"] == 0 and len(versions) > 3 and watch.polls > 3
    return 0 if is_right or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
