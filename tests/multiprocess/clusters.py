"""Runs checks on workers that meet by TF_CONFIG, without Horovod; by hand: `python -m tests.multiprocess.clusters`.

Each worker is a process of its own, forked from one that has loaded TensorFlow (tests/forked.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests import forked
from tests.multiprocess.harness import ROOT, Job, environment_of, kill, outcomes_in


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]


def run(command: Sequence[str], ranks: int, deadline: float, **environment: str) -> Job:
    """Runs `python *command` on `ranks` workers until all have ended, for `deadline` seconds at the most.

    Its returncode is that of the first worker that failed; its output that of all, one after the other.
    """
    mark, start = uuid.uuid4().hex, time.monotonic()
    addresses = [f"localhost:{port}" for port in free_ports(ranks)]
    processes, files = [], [tempfile.TemporaryFile("w+", errors="replace") for _ in range(ranks)]  # noqa: SIM115 (closed below)
    for rank, file in enumerate(files):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        processes.append(
            subprocess.Popen(
                forked.shared().command(*command),
                cwd=ROOT,
                env={**environment_of(mark), "TF_CONFIG": json.dumps(config), **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        )
    timed_out = False
    for process in processes:
        try:
            process.wait(max(0.0, start + deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
            kill(mark)
            process.wait()
    kill(mark)
    outputs = []
    for file in files:
        with file:
            file.seek(0)
            outputs.append(file.read())
    failed = [process.returncode for process in processes if process.returncode]
    seconds = time.monotonic() - start
    return Job(ranks, failed[0] if failed else 0, "\n".join(outputs), seconds, timed_out)


def run_checks(modules: Sequence[str], ranks: int, folder: Path, deadline: float, names: Sequence[str] = ()) -> Job:
    """Runs the checks of `modules` that are named, or all."""
    wanted = {"SOK_TEST_CHECKS": " ".join(names)} if names else {}
    job = run(["-m", "tests.multiprocess.worker", str(folder), *modules], ranks, deadline, **wanted)
    return dataclasses.replace(job, outcomes=outcomes_in(folder, ranks))


if __name__ == "__main__":  # by hand: MODULE... [--only CHECK...]
    arguments, _, only = " ".join(sys.argv[1:]).partition("--only")
    done = run_checks(
        [f"tests.multiprocess.checks_{name}" for name in arguments.split()],
        int(os.environ.get("RANKS", "2")),
        Path(tempfile.mkdtemp()),
        600.0,
        only.split(),
    )
    for rank, outcomes in enumerate(done.outcomes):
        for name, outcome in outcomes.items():
            sys.stdout.write(f"rank {rank} {name}: {outcome.error or f'{outcome.seconds:.2f} s'}\n")
    sys.stdout.write(f"{done.returncode} {done.timed_out} {done.seconds:.1f} s\n{done.output[-3000:]}\n")
