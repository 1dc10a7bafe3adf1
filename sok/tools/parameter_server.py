"""`sok parameter-server`: one task of a cluster of TensorFlow's own runtime, which knows our ops."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

_JOBS = ("ps", "worker", "chief")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        metavar="JSON",
        help='the tasks of each job, {"ps": ["host:port", ...], "worker": [...], "chief": [...]}; without it TF_CONFIG '
        "says all",
    )
    parser.add_argument("--job", choices=_JOBS, help="of this task (default: ps)")
    parser.add_argument("--task", metavar="N", type=int, help="its number, from 0 (default: 0)")


def main(options: argparse.Namespace) -> int:
    """Runs the server until the process is ended. 2 for a cluster that makes no sense, 1 if it cannot be started."""
    try:
        cluster, job, task = _asked(options)
    except ValueError as error:
        print(f"sok parameter-server: {error}", file=sys.stderr)
        return 2
    return run(cluster, job, task)


def run(cluster: dict[str, list[str]], job: str, task: int) -> int:
    """Runs a task of a cluster until the process is ended; 1 if it cannot be started."""
    import tensorflow as tf

    from sok.base import _ops

    _ops.lib()  # before anybody asks for an op of ours
    try:
        server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job, task, protocol="grpc")
    except (tf.errors.OpError, ValueError) as error:
        print(f"sok parameter-server: {cluster[job][task]}: {error}", file=sys.stderr)
        return 1
    print(f"sok parameter-server: {job} {task} is at {cluster[job][task]}", flush=True)
    server.join()
    return 0


def _asked(options: argparse.Namespace) -> tuple[dict[str, list[str]], str, int]:
    """The cluster, and the job and number of this task. Raises ValueError."""
    text, where = options.cluster, "--cluster"
    said: dict[str, Any] = {}
    if text is None:
        text, where = os.environ.get("TF_CONFIG"), "TF_CONFIG"
        if text is None:
            raise ValueError("give --cluster, or set TF_CONFIG")
    try:
        parsed = json.loads(text)
        said = parsed if where == "TF_CONFIG" else {"cluster": parsed}
        cluster = {str(job): [str(address) for address in tasks] for job, tasks in said["cluster"].items()}
        of_task = said.get("task", {})
        job = options.job or str(of_task.get("type", "ps"))
        task = int(of_task.get("index", 0)) if options.task is None else options.task
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is not the JSON of a cluster ({type(error).__name__}: {error}): {text}") from None
    if not 0 <= task < len(cluster.get(job, ())):
        raise ValueError(f"{where} has no task {task} of job '{job}': {text}")
    return cluster, job, task
