"""Kills workers of a job, and adds others, at random: training goes on, and gives what it would have given.

    python examples/elastic.py --kills 3 --check

All workers run on this host, under names that are other spellings of localhost, as Horovod takes a name no more once a
worker of it was killed. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES, USERS, BATCH, EVERY, EPOCHS = 2400, 300, 24, 10, 3  # 24: what 1, 2, 3 and 4 workers divide


def worker(folder: Path, seed: int, pause: float) -> None:
    """Trains, wherever the job stands."""
    import numpy as np
    import tensorflow as tf

    import sok

    rng = np.random.default_rng(seed)
    users = rng.zipf(1.3, SAMPLES) % USERS
    taste = np.random.default_rng(0).normal(size=USERS)
    labels = (rng.random(SAMPLES) < 1 / (1 + np.exp(-2 * taste[users]))).astype(np.float32)

    sok.Init(seed=seed)
    table = sok.EmbeddingVariable(dim=8, capacity=USERS, name="user")
    uses = sok.EmbeddingVariable(dim=1, capacity=SAMPLES, name="uses", initializer="zeros")  # of each sample, counted
    weights = tf.Variable(np.random.default_rng(seed).normal(size=8).astype(np.float32))
    optimizer, counter = sok.optimizers.Adam(0.02), sok.optimizers.SGD(1.0)
    state = sok.elastic.State(folder / "saves", [table, uses, optimizer, counter, weights], step=0)

    def note(what: str) -> None:
        line = {"what": what, "host": os.environ.get("HOROVOD_HOSTNAME"), "pid": os.getpid(), "rank": sok.rank()}
        line |= {"size": sok.size(), "step": state.step, "time": time.time(), "rss": _resident()}
        with open(folder / "log", "a") as log:
            log.write(json.dumps(line) + "\n")

    def train(state: sok.elastic.State) -> None:
        @tf.function
        def step(ids: tf.Tensor, samples: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                logits = tf.linalg.matvec(tf.nn.embedding_lookup(table, ids), weights)
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_sum(losses) / BATCH - tf.reduce_sum(tf.nn.embedding_lookup(uses, samples))
            tape = sok.DistributedGradientTape(tape, op=sok.Sum)
            of_table, of_uses, of_weights = tape.gradient(loss, [table, uses, weights])
            optimizer.apply_gradients([(of_table, table)])
            counter.apply_gradients([(of_uses, uses)])
            weights.assign_sub(0.02 * of_weights)

        note("train")
        per_epoch = SAMPLES // BATCH
        while state.step < EPOCHS * per_epoch:
            epoch, place = divmod(state.step, per_epoch)
            order = np.random.default_rng([seed, epoch]).permutation(SAMPLES)[place * BATCH : (place + 1) * BATCH]
            mine = np.array_split(order, sok.size())[sok.rank()]
            step(tf.constant(users[mine], tf.int64), tf.constant(mine, tf.int64), tf.constant(labels[mine]))
            state.step += 1
            if sok.rank() == 0:
                note("step")
            time.sleep(pause)
            if state.step % EVERY == 0:
                state.commit()

    sok.elastic.run(train)(state)
    used = uses.sparse_read(tf.range(SAMPLES, dtype=tf.int64)).numpy()[:, 0]
    scores = table.sparse_read(tf.constant(users, tf.int64)).numpy() @ weights.numpy()
    auc = tf.keras.metrics.AUC(num_thresholds=1000)
    auc.update_state(labels, 1 / (1 + np.exp(-scores)))
    steps = [state.step, int(table.step), int(uses.step), int(optimizer.iterations)]
    if sok.rank() == 0:
        said = {"auc": float(auc.result()), "uses": [float(used.min()), float(used.max())], "steps": steps}
        (folder / "result").write_text(json.dumps(said))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _name(number: int) -> str:
    """'localhost' in so many spellings."""
    return "".join(c.upper() if number >> place & 1 else c for place, c in enumerate("localhost"))


def _log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def disturbed(folder: Path, seed: int, kills: int, pause: float, deadline: float) -> dict[str, Any]:
    """A job of 2 to 4 workers of which some are killed. Gives its result, and what each disturbance has cost."""
    rng, names, told = random.Random(seed), [0, 1], []
    hosts, script = folder / "hosts", folder / "discover"

    def tell() -> None:
        (folder / "hosts.tmp").write_text("".join(f"{_name(n)}:1\n" for n in names))
        (folder / "hosts.tmp").rename(hosts)

    tell()
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    command = ["horovodrun", "--gloo", "-np", "2", "--min-np", "1", "--max-np", "4", "--network-interface", "lo"]
    command += ["--host-discovery-script", str(script), sys.executable, __file__, "--worker", str(folder)]
    end = time.monotonic() + deadline
    with open(folder / "output", "w") as output:
        job = subprocess.Popen(
            [*command, "--seed", str(seed), "--pause", str(pause)],
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Gloo waits so long for a worker that starts, and then ends those who wait. Its own 30 s may be few.
            env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "600", **os.environ},
        )
        try:
            left = ["kill"] * kills + ["add"] * kills
            rng.shuffle(left)
            since = 0
            while job.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                log = _log(folder)
                workers = {x["host"]: x for x in log[since:] if x["what"] == "train" and x["size"] == len(names)}
                steps = [x["step"] for x in log[since:] if x["what"] == "step" and x["size"] == len(names)]
                if len(workers) < len(names) or len(steps) < 2 or not left:
                    continue
                time.sleep(rng.uniform(0.0, 3 * EVERY * pause))
                what = left.pop()
                if what == "add" and len(names) == 4 or what == "kill" and len(names) == 1:
                    continue
                since, before = len(_log(folder)), max(x["step"] for x in _log(folder))
                if what == "kill":
                    gone = rng.choice(names)
                    os.kill(workers[_name(gone)]["pid"], signal.SIGKILL)
                    names.remove(gone)
                if what == "add" or len(names) < 2:
                    names.append(max([1, *names, *(t["most"] for t in told)]) + 1)
                tell()
                told.append({"what": what, "from": before, "most": max(names), "at": time.time(), "since": since})
            code = job.wait(max(1.0, end - time.monotonic()))
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
                job.wait(30)
    log = _log(folder)
    for one in told:
        again = next((x for x in log[one["since"] :] if x["what"] == "train"), None)
        before = max((x["step"] for x in log if x["time"] <= (again or one).get("time", one["at"])), default=0)
        one["steps_again"] = 0 if again is None else before - again["step"]
        one["seconds"] = 0.0 if again is None else round(again["time"] - one["at"], 1)
    found = json.loads((folder / "result").read_text()) if (folder / "result").exists() else {}
    oldest = [x["rss"] for x in log if x["what"] == "train" and x["pid"] == log[-1]["pid"]] if log else [0]
    return {**found, "status": code, "told": told, "rss": [oldest[0], oldest[-1]], "sizes": _sizes(log)}


def _sizes(log: list[dict[str, Any]]) -> list[int]:
    sizes = [x["size"] for x in log if x["what"] == "train" and x["rank"] == 0]
    return [size for place, size in enumerate(sizes) if place == 0 or sizes[place - 1] != size]


def undisturbed(seed: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    try:
        command = [sys.executable, __file__, "--worker", str(folder), "--seed", str(seed), "--pause", "0"]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads((folder / "result").read_text())
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="workers to kill; as many are added")
    parser.add_argument("--check", action="store_true", help="compare with runs that nobody disturbs")
    parser.add_argument("--runs", type=int, default=5, help="how many of these")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds after each step")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.seed, given.pause)
        return 0
    folder = Path(tempfile.mkdtemp())
    found = disturbed(folder, given.seed, given.kills, given.pause, given.deadline)
    kills, adds = ([t for t in found["told"] if t["what"] == what] for what in ("kill", "add"))
    line = {
        "kills": len(kills),
        "adds": len(adds),
        "sizes": found["sizes"],
        "auc": found.get("auc"),
        "uses_of_each_sample": found.get("uses"),
        "steps": found.get("steps"),
        "steps_done_again": {"kills": [t["steps_again"] for t in kills], "adds": [t["steps_again"] for t in adds]},
        "seconds_to_go_on": [t["seconds"] for t in found["told"]],
        "resident_mb": [round(rss / 2**20) for rss in found["rss"]],
    }
    ok = found["status"] == 0 and found.get("uses") == [EPOCHS, EPOCHS]
    ok = ok and set(found["steps"]) == {EPOCHS * SAMPLES // BATCH}
    ok = ok and all(t["steps_again"] <= EVERY for t in kills) and not any(t["steps_again"] for t in adds)
    if given.check:
        aucs = [undisturbed(given.seed + run)["auc"] for run in range(given.runs)]
        line["auc_undisturbed"] = aucs
        ok = ok and min(aucs) - 1e-3 <= found["auc"] <= max(aucs) + 1e-3 and abs(found["auc"] - aucs[0]) < 1e-3
    print(json.dumps({"ok": bool(ok), **line}))
    if ok:
        shutil.rmtree(folder)
    else:
        print(f"The job's output: {folder}/output", file=sys.stderr)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
