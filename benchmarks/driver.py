"""The parent side: starts the contestants of a job, lets them take turns, and collects windows."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import jobs, limits, machine, peers
from benchmarks.contestant import shape_of
from benchmarks.job import Case, Job
from benchmarks.judge import Result, make_result
from benchmarks.limits import external
from benchmarks.machine import CpuClock
from benchmarks.statistics import Window, summarize_together
from benchmarks.workloads import ROOT, W1_NEW_STEPS, data_dir

LOGS = ROOT / "build" / "bench" / "log"
# Kept free, for the system and what the estimates of jobs.py forget.
SPARE_GIB = 2.0


class Failed(Exception):
    """A contestant did not do what it was told; the text says how."""


class Pace:
    """How long to measure: windows per contestant, and the seconds of each."""

    def __init__(self, windows: int, window_s: float, case_s: float) -> None:
        self.windows, self.window_s = windows, window_s
        # A contestant whose steps are so slow that it has used this many seconds stops early, after three windows.
        self.case_s = case_s
        # When (time.monotonic) the run has to be over; nothing is begun after that.
        self.deadline = math.inf

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


TIME_IS_UP = "left out: the time of this run was up"
FULL, QUICK = Pace(9, 0.4, 20.0), Pace(5, 0.2, 4.0)


class Contestant:
    """A running contestant: one process, or the ranks of one Horovod job."""

    def __init__(self, name: str, job: Job, threads: int) -> None:
        self.name, self._job = name, job
        self.ranks, threads = shape_of(name) or (1, threads)
        self.about: dict[str, str] = {}
        self.measures: list[str] = []
        self.once: set[str] = set()
        self._is_ready = False
        self._next: dict[str, int] = {}
        self._streams: list[Any] = []
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log_path = LOGS / f"{job.name.replace('/', '-')}.{name}.log"
        # A path below 100 characters, which is what a socket may have.
        self._folder = tempfile.mkdtemp(prefix="sok-bench-")
        self._listener = socket.socket(socket.AF_UNIX)
        path = os.path.join(self._folder, "socket")
        self._listener.bind(path)
        self._listener.listen(self.ranks)
        environment = {
            **os.environ,
            "SOK_BENCH_SOCKET": path,
            "SOK_BENCH_DATA": str(data_dir()),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_USE_LEGACY_KERAS": "1" if name == "tfra" else "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(threads),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, threads: int) -> list[str]:
        parameters = {**self._job.parameters, "threads": threads}
        if self.name == "ref":
            return limits.command(parameters)
        python = str(peers.python_of(self.name))
        command = [python, "-m", "benchmarks.contestant", self.name, json.dumps(parameters)]
        if self.ranks > 1:
            launcher = Path(sys.executable).parent / "horovodrun"
            return [str(launcher), "--gloo", "-np", str(self.ranks), *command]
        return command

    def wait_ready(self, deadline_s: float) -> None:
        """Until it is prepared. Raises Failed, or Unsupported's text as Failed with `is_unsupported`."""
        end = time.monotonic() + deadline_s
        streams = {}
        while len(streams) < self.ranks:
            self._listener.settimeout(1.0)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise Failed(f"ended with status {self._process.returncode}: {self._last_words()}") from None
                if time.monotonic() > end:
                    raise Failed(f"did not start in {deadline_s:.0f} s") from None
                continue
            connection.settimeout(max(1.0, end - time.monotonic()))
            stream = connection.makefile("rw", encoding="utf-8")
            streams[json.loads(stream.readline())["rank"]] = (stream, connection)
        self._streams = [streams[rank][0] for rank in sorted(streams)]
        for answer in self._hear():
            if "unsupported" in answer:
                raise Failed(answer["unsupported"])
            self.measures = answer["ready"]
            self.once = set(answer["once"])
            self.about = {"how": answer["about"], "version": answer["version"]}
        for _, connection in streams.values():
            connection.settimeout(600.0)
        self._is_ready = True

    def steps(self, measure: str, count: int) -> Window:
        """Runs `count` more steps."""
        first = self._next.get(measure, 0)
        self._next[measure] = first + count
        # Threads of OpenMP spin for some milliseconds after their work: not in the next one's time.
        time.sleep(0.02)
        before = CpuClock.read()
        self._say(f"steps {measure} {first} {count}")
        answers = self._hear()
        others = machine.load_of_others(before, CpuClock.read(), sum(answer["cpu_s"] for answer in answers))
        # A step of several ranks has ended when the last of them has.
        seconds = tuple(max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True))
        return Window(seconds, others)

    def steps_done(self, measure: str) -> int:
        return self._next.get(measure, 0)

    def inspect(self, measure: str) -> dict[str, Any]:
        """What the first rank has to say beside times."""
        self._say(f"inspect {measure}")
        return self._hear()[0]

    def _say(self, line: str) -> None:
        for stream in self._streams:
            stream.write(line + "\n")
            stream.flush()

    def _hear(self) -> list[dict[str, Any]]:
        answers = []
        for stream in self._streams:
            try:
                line = stream.readline()
            except TimeoutError:
                raise Failed("did not answer in time") from None
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                raise Failed(f"ended with status {self._process.poll()}: {self._last_words()}")
            answers.append(json.loads(line))
        # Not before all have answered: the next answers belong to the next command.
        for answer in answers:
            if "error" in answer:
                raise Failed(answer["error"])
        return answers

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return (lines[-1][:200] if lines else "nothing in") + f" ({self._log_path})"

    def close(self) -> None:
        """Ends the process, by force after a while."""
        with contextlib.suppress(OSError):
            self._say("quit")
        self._listener.close()
        try:
            # One that is not prepared does not listen.
            self._process.wait(20.0 if self._is_ready else 0.5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def batches_of(peers_: Sequence[str], gib_of: Callable[[str], float], room_gib: float) -> list[list[str]]:
    """Packs contestants, in order, into groups that fit side by side; one that is too large goes alone."""
    groups: list[list[str]] = []
    used = 0.0
    for name in peers_:
        if not groups or used + gib_of(name) > room_gib:
            groups.append([])
            used = 0.0
        groups[-1].append(name)
        used += gib_of(name)
    return groups


def left_out(job: Job, reason: str) -> list[Result]:
    """The results of a job that did not run."""
    absent = {name: reason for name in job.contestants}
    return [make_result(job, case, {}, dict(absent), {}, {}, []) for case in job.cases]


def run_job(job: Job, threads: int, pace: Pace, wanted: Iterable[str], report: Callable[[str], None]) -> list[Result]:
    """Measures all cases of a job. What goes wrong with a contestant makes it absent, with the reason."""
    absent: dict[str, str] = {}
    present = []
    wanted = set(wanted)
    for name in job.contestants:
        reason = peers.why_absent(name) if name != "ref" else limits.why_absent()
        if wanted and name not in wanted and name != job.subject:
            reason = "left out (--contestants)"
        if reason:
            absent[name] = reason
        else:
            present.append(name)
    windows: dict[tuple[str, str], list[Window]] = {}
    about: dict[str, str] = {}
    inspected: dict[str, dict[str, Any]] = {}
    notes: list[str] = []

    available = machine.memory_bytes("MemAvailable") / jobs.GIB - SPARE_GIB
    anchors = [name for name in present if name in (job.subject, "ref")]
    others = [name for name in present if name not in anchors]
    fits_anchors = sum(job.gib_for(name) for name in anchors) <= available
    if job.gib_for(job.subject) > available:
        reason = f"needs {job.gib_for(job.subject):.0f} GiB, {max(0.0, available):.0f} are free"
        return left_out(job, reason)
    room = available - sum(job.gib_for(name) for name in anchors)
    if not fits_anchors or any(job.gib_for(name) > room for name in others):
        # Not all side by side: each in turn alone, the subject first and last.
        notes.append("not interleaved: memory for one at a time")
        groups = [[name] for name in present] + ([[job.subject]] if others else [])
        anchors = []
    else:
        groups = batches_of(others, job.gib_for, room) or [[]]

    outside: dict[str, Any] = {}
    if "ref" in present:
        try:
            report(f"{job.name}: the program of {external.VARIABLE}")
            measures = [case.measure for case in job.cases]
            outside = external.figures({**job.parameters, "threads": threads}, measures, pace.window_s)
        except external.Absent as reason:
            absent[external.NAME] = str(reason)

    alive: dict[str, Contestant] = {}

    def start(names: Sequence[str]) -> None:
        # All at once: most of a preparation is waiting for imports and files.
        started = {}
        for name in names:
            if pace.left_s <= 0:
                absent[name] = TIME_IS_UP
            elif name not in alive and name not in absent:
                report(f"{job.name}: preparing {name}")
                started[name] = Contestant(name, job, threads)
        for name, contestant in started.items():
            try:
                contestant.wait_ready(min(600.0, pace.left_s))
                alive[name] = contestant
                about[name] = f"{contestant.about['version']}: {contestant.about['how']}"
            except Failed as failure:
                absent[name] = str(failure) if pace.left_s > 0 else TIME_IS_UP
                contestant.close()

    try:
        for group in groups:
            start([*anchors, *group])
            for case in job.cases:
                report(f"{job.name}: {case.name}")
                _take_turns(case, alive, pace, windows, absent)
            for name in group:
                if name in alive:
                    alive.pop(name).close()
        # When all times are taken.
        subject = alive.get(job.subject)
        for case in job.cases if subject is not None else ():
            try:
                inspected[case.name] = subject.inspect(case.measure_for(job.subject))
            except Failed as failure:
                notes.append(f"{case.name}: no figures beside times: {failure}")
    finally:
        for contestant in alive.values():
            contestant.close()

    results = []
    for case in job.cases:
        got = {name: windows.get((case.name, name)) for name in job.contestants}
        figures = summarize_together({name: some for name, some in got.items() if some})
        if case.measure in outside:
            figures[external.NAME] = outside[case.measure]
        elif external.NAME in absent:
            got[external.NAME] = None
        missing = {
            name: absent.get(name, "does not measure this")
            for name in got
            if name not in figures and (name in absent or not (name == job.subject and inspected.get(case.name)))
        }
        results.append(make_result(job, case, figures, missing, about, inspected.get(case.name, {}), list(notes)))
    return results


def _take_turns(
    case: Case,
    alive: dict[str, Contestant],
    pace: Pace,
    windows: dict[tuple[str, str], list[Window]],
    absent: dict[str, str],
) -> None:
    """Rounds of one window for each contestant, until all have their windows."""
    counts: dict[str, int] = {}
    used: dict[str, float] = {}
    for turn in range(pace.windows):
        if turn > 0 and pace.left_s <= 0:
            return
        for name, contestant in list(alive.items()):
            measure = case.measure_for(name)
            if measure not in contestant.measures:
                continue
            is_once = measure in contestant.once
            if is_once and contestant.steps_done(measure) >= W1_NEW_STEPS:
                continue
            got = windows.setdefault((case.name, name), [])
            try:
                if name not in counts:
                    # The first step may trace, the second may still allocate; then one to know how many fit a window.
                    window = contestant.steps(measure, 1 if is_once else 3)
                    counts[name] = 1 if is_once else max(1, int(pace.window_s / max(1e-6, window.seconds[-1])))
                    used[name] = sum(window.seconds)
                if used[name] > pace.case_s and len(got) >= 3:
                    continue
                window = contestant.steps(measure, counts[name])
                used[name] += sum(window.seconds)
                got.append(window)
            except Failed as failure:
                absent[name] = str(failure)
                alive.pop(name).close()
