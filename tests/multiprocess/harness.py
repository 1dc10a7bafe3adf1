"""Runs a program on R real workers under `horovodrun`, with a deadline, and leaves none of them behind.

Starting TensorFlow R + 1 times (the launcher loads it, too) is what a job costs. So launcher and workers are forked
from a process that has loaded it (tests/forked.py), unless they are to be fresh. And one job runs many checks:
functions `check_*(world)` of the modules given, in order, on every rank (with pytest's `monkeypatch` and a folder
`tmp_path_of_rank`, if they name them). What each rank says of each check comes back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import forked
from tests.forked import MARK

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = "from horovod.runner.launch import run_commandline; run_commandline()"


@dataclasses.dataclass(frozen=True)
class World:
    """Who a worker is; what a check is given."""

    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank says of one check: what it returned, or the traceback of what it raised."""

    check: str
    value: Any = None
    error: str | None = None
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that has ended, by itself or at its deadline."""

    ranks: int
    returncode: int
    output: str
    seconds: float
    timed_out: bool
    outcomes: tuple[dict[str, Outcome], ...] = ()  # by rank

    def values(self, check: str) -> list[Any]:
        """What the ranks returned. Raises AssertionError with every rank's error if one failed or did not get there."""
        said = [outcomes.get(check) for outcomes in self.outcomes]
        complaints = [
            f"rank {rank}: " + ("did not finish the check" if outcome is None else outcome.error or "")
            for rank, outcome in enumerate(said)
            if outcome is None or outcome.error
        ]
        if complaints or len(said) != self.ranks:
            ended = "was stopped at its deadline" if self.timed_out else f"ended with status {self.returncode}"
            raise AssertionError(
                f"{check} failed on {self.ranks} ranks; the job {ended} after {self.seconds:.0f} s.\n"
                + "\n".join(complaints or ["no rank has reported anything"])
                + f"\n--- the end of the job's output\n{self.output[-4000:]}"
            )
        return [outcome.value for outcome in said if outcome is not None]


def run_checks(modules: Sequence[str], ranks: int, folder: Path, deadline: float, **starts: bool) -> Job:
    """Runs all checks of `modules` on `ranks` workers. `starts` are those of `launching`."""
    job = run([sys.executable, "-m", "tests.multiprocess.worker", str(folder), *modules], ranks, deadline, **starts)
    return dataclasses.replace(job, outcomes=outcomes_in(folder, ranks))


def outcomes_in(folder: Path, ranks: int) -> tuple[dict[str, Outcome], ...]:
    """What the ranks have said (worker.py), as far as they came."""
    outcomes = []
    for rank in range(ranks):
        with contextlib.suppress(FileNotFoundError), (folder / f"{rank}.pickle").open("rb") as file:
            outcomes.append({})
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # killed while it said the last
                while True:
                    said = pickle.load(file)
                    outcomes[-1][said.check] = said
    return tuple(outcomes)


def launching(command: Sequence[str], ranks: int, fresh: bool = False, fresh_workers: bool = False) -> list[str]:
    """What launches a command on `ranks` workers: a forked process that does what `horovodrun` does, as are workers.

    Args:
        fresh: a real `horovodrun`, and workers that are started.
        fresh_workers: started workers, such as those that settle how TensorFlow is imported.
    """
    options = ["--gloo", "-np", str(ranks)]
    if fresh:
        return [_horovodrun(), *options, *command]
    if command[0] == sys.executable and not fresh_workers:
        command = forked.shared().command(*command[1:])
    return forked.shared().command("-c", _LAUNCHER, *options, *command)


def run(command: Sequence[str], ranks: int, deadline: float, **starts: bool) -> Job:
    """Runs a command on `ranks` workers and waits until all of them have ended, for `deadline` seconds at the most.

    `starts` are those of `launching`.
    """
    mark = uuid.uuid4().hex
    start = time.monotonic()
    process = subprocess.Popen(
        launching(command, ranks, **starts),
        cwd=ROOT,
        env=environment_of(mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = False
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        timed_out = True
        kill(mark)
        output, _ = process.communicate()
    finally:
        kill(mark)
    # TensorFlow's greetings and advice would fill what is shown of a failure.
    told = [
        line
        for line in output.splitlines()
        if not re.search(r"port\.cc|cuda|absl::InitializeLog|oneDNN|WARNING:tensorflow", line)
    ]
    return Job(ranks, process.returncode, "\n".join(told), time.monotonic() - start, timed_out)


def environment_of(mark: str) -> dict[str, str]:
    """That of the processes of a job."""
    return {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # Several TensorFlows share few cores.
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # tests/device on a machine with a GPU: all workers of a job share the first.
        "CUDA_VISIBLE_DEVICES": "0" if os.environ.get("SOK_DEVICE_TESTS") == "GPU" else "-1",
        # How often (ms) Horovod's thread asks its peers whether there is something to do. Gloo spins until all have
        # asked: at 1 that takes a fifth of a processor.
        "HOROVOD_CYCLE_TIME": "20",
    }


def processes_of(mark: str) -> list[int]:
    """Processes of a job that still run. Workers leave the launcher's process group, so their environment tells."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def kill(mark: str) -> None:
    """Ends all processes of a job. What one of them has started meanwhile is found when looked for again."""
    until = time.monotonic() + 30
    while (left := processes_of(mark)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # a process takes its time to die where others compute


def _horovodrun() -> str:
    beside = Path(sys.executable).parent / "horovodrun"
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise FileNotFoundError(f"horovodrun is neither beside {sys.executable} nor in PATH.")
    return found
