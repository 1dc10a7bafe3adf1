"""Kills workers of a job, and adds others, at random: training goes on, and gives what it would have given.

    python examples/elastic.py --kills 3 --check
    python examples/elastic.py --kills 3 --replicas 1

All workers run on this host. They are killed whatever they do: while they start, meet the others, train or commit. With
replicas a commit is in the memory of neighbours, and every third in files. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
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

SAMPLES, USERS, BATCH, EVERY = 2400, 300, 24, 10  # 24: what 1, 2, 3 and 4 workers divide
SAVE_EVERY = 3  # commits, with replicas


def worker(folder: Path, given: argparse.Namespace) -> None:
    """Trains, wherever the job stands."""
    seed, pause, epochs = given.seed, given.pause, given.epochs
    with open(folder / "log", "a") as log:
        log.write(json.dumps({"what": "starts", "pid": os.getpid(), "time": time.time()}) + "\n")

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
    tracked, more = [table, uses, optimizer, counter, weights], {}
    if given.replicas:
        more = {"replicas": given.replicas, "save_every": SAVE_EVERY}
    state = sok.elastic.State(folder / "saves", tracked, **more, step=0)

    def note(what: str) -> None:
        line = {"what": what, "pid": os.getpid(), "rank": sok.rank()}
        line |= {"size": sok.size(), "step": state.step, "time": time.time(), "rss": _resident()}
        line |= {"from": state.origin}
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
        while state.step < epochs * per_epoch:
            epoch, place = divmod(state.step, per_epoch)
            order = np.random.default_rng([seed, epoch]).permutation(SAMPLES)[place * BATCH : (place + 1) * BATCH]
            mine = np.array_split(order, sok.size())[sok.rank()]
            step(tf.constant(users[mine], tf.int64), tf.constant(mine, tf.int64), tf.constant(labels[mine]))
            state.step += 1
            if sok.rank() == 0:
                note("step")
            if (folder / "disturbed").exists():  # else it may hurry
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


def _log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def disturbed(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A job of 2 to 4 workers, of which some are killed while others come and go. Its result, and what it has cost."""
    rng, size, told = random.Random(given.seed), 1 + (given.neighbours or 1), []
    script = folder / "discover"

    def tell() -> None:
        (folder / "new").write_text(f"localhost:{size}\n")
        (folder / "new").rename(folder / "hosts")

    tell()
    (folder / "disturbed").touch()
    script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
    script.chmod(0o755)
    command = [sys.executable, "-m", "sok", "elastic", "-np", str(size), "--max-np", "4", "--network-interface", "lo"]
    command += ["--host-discovery-script", str(script), "--deadline", "120", *_worker(folder, given, given.pause)]
    end = time.monotonic() + given.deadline
    with open(folder / "output", "w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            left = ["kill"] * given.kills + ["add"] * given.kills
            rng.shuffle(left)
            while left and job.poll() is None and time.monotonic() < end:
                # Else while workers start, or meet.
                settled = not told or given.neighbours or rng.random() < 0.75
                limit = time.monotonic() + (60.0 if not told else 20.0)
                while settled and not _is_settled(_log(folder), size) and time.monotonic() < limit:
                    time.sleep(0.1)
                time.sleep(rng.uniform(0.0, 2 * EVERY * given.pause) if settled else rng.uniform(0.5, 5.0))
                living = _neighbours(_log(folder), size) if given.neighbours else _started(_log(folder))
                at_once = given.neighbours or 1
                if len(living) < at_once:
                    continue
                what = left.pop()
                if what == "kill":
                    if size > at_once + 1 and rng.random() < 0.5:
                        size -= 1  # else another starts in its place
                        tell()
                    first = rng.randrange(len(living))
                    for number in range(at_once):
                        with contextlib.suppress(ProcessLookupError):  # it has just left
                            os.kill(living[(first + number) % len(living)], signal.SIGKILL)
                elif size == 4:
                    what, size = "take away", rng.randint(at_once + 1, 3)
                    tell()
                else:
                    size += 1
                    tell()
                told.append({"what": what, "time": time.time()})
            (folder / "disturbed").unlink()
            code: int | None = job.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None  # it has not ended
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(120)
    found = json.loads((folder / "result").read_text()) if (folder / "result").exists() else {}
    return {**found, "status": code, "told": told, **_cost(_log(folder), told)}


def _started(log: list[dict[str, Any]]) -> list[int]:
    """Processes of workers that live, whatever they do."""
    return [x["pid"] for x in log if x["what"] == "starts" and _lives(x["pid"])]


def _neighbours(log: list[dict[str, Any]], size: int) -> list[int]:
    """Processes of workers that train, in the order of their ranks; none if they are not so many."""
    trains = {x["pid"]: x for x in log if x["what"] == "train" and _lives(x["pid"])}
    found = sorted((x["rank"], pid) for pid, x in trains.items() if x["size"] == size)
    return [pid for _, pid in found] if [rank for rank, _ in found] == list(range(size)) else []


def _is_settled(log: list[dict[str, Any]], size: int) -> bool:
    """Whether so many train."""
    last = next((x for x in reversed(log) if x["what"] in ("train", "step")), None)
    return last is not None and last["what"] == "step" and last["size"] == size


def _cost(log: list[dict[str, Any]], told: list[dict[str, Any]]) -> dict[str, Any]:
    """What was done again, how long nobody trained after a kill, and the memory of the worker that lived longest."""
    reached, again, sizes, origins = 0, [], [], []
    for x in log:
        if x["what"] == "train" and x["rank"] == 0:
            again.append(reached - x["step"])
            sizes.append(x["size"])
            origins.append(x["from"])
            reached = x["step"]
        elif x["what"] == "step":
            reached = x["step"]
    steps = [x["time"] for x in log if x["what"] == "step"]
    pauses = [min((t for t in steps if t > one["time"]), default=one["time"]) - one["time"] for one in told]
    by_pid: dict[int, list[int]] = {}
    for x in log:
        if x["what"] == "train":
            by_pid.setdefault(x["pid"], []).append(x["rss"])
    return {
        "again": again,
        "sizes": sizes,
        "origins": origins,
        "seconds": [round(p, 1) for p, one in zip(pauses, told, strict=True) if one["what"] == "kill"],
        "rss": max(by_pid.values(), key=len, default=[0]),
    }


def _lives(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        return path.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def _worker(folder: Path, given: argparse.Namespace, pause: float) -> list[str]:
    command = [sys.executable, __file__, "--worker", str(folder), "--seed", str(given.seed), "--pause", str(pause)]
    return [*command, "--epochs", str(given.epochs), "--replicas", str(given.replicas)]


def undisturbed(given: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    try:
        subprocess.run(_worker(folder, given, 0.0), check=True, capture_output=True)
        return json.loads((folder / "result").read_text())
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="workers to kill; as often their number is changed")
    parser.add_argument("--check", action="store_true", help="compare with runs that nobody disturbs")
    parser.add_argument("--runs", type=int, default=5, help="how many of these")
    parser.add_argument("--replicas", type=int, choices=[0, 1], default=0, help="commits to the memory of neighbours")
    parser.add_argument(
        "--neighbours",
        type=int,
        choices=[1, 2],
        help="kill so many workers at once that train, and are neighbours (default: one, whatever it does)",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--epochs", type=int, help="(default: twice as many as kills, and 2)")
    parser.add_argument(
        "--pause", type=float, default=0.1, help="seconds after each step, as long as workers are killed"
    )
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.epochs = given.epochs or 2 * given.kills + 2
    if given.worker:
        worker(given.worker, given)
        return 0
    folder = Path(tempfile.mkdtemp())
    found = disturbed(folder, given)
    kinds = [one["what"] for one in found["told"]]
    line = {
        "kills": kinds.count("kill"),
        "adds": kinds.count("add"),
        "taken_away": kinds.count("take away"),
        "status": found["status"],
        "sizes": found["sizes"],
        "auc": found.get("auc"),
        "uses_of_each_sample": found.get("uses"),
        "steps": found.get("steps"),
        "steps_done_again": found["again"],
        "from": found["origins"],
        "seconds_from_kill_to_step": found["seconds"],
        "resident_mb": [round(rss / 2**20) for rss in found["rss"]],
    }
    ok = found["status"] == 0 and found.get("uses") == [given.epochs, given.epochs]
    # With replicas those go back to the last save who have lost two neighbours before rows were kept anew.
    of_files = EVERY * (SAVE_EVERY if given.replicas else 1)
    most = [of_files if origin == "files" else EVERY for origin in found["origins"]]
    ok = ok and len(kinds) == 2 * given.kills and all(n <= at for n, at in zip(found["again"], most, strict=True))
    ok = ok and set(found["steps"]) == {given.epochs * SAMPLES // BATCH}
    if given.check:
        seeds = [argparse.Namespace(**{**vars(given), "seed": given.seed + run}) for run in range(given.runs)]
        aucs = [undisturbed(one)["auc"] for one in seeds]
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
