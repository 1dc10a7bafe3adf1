"""A deadline, with words, for a collective to which some workers never come.

Horovod lets the others wait for ever. So a thread of each worker tells the launcher's key-value store now and then what
collectives it has begun, which of them it waits for, and where its program is. Who waits too long reads what its peers
have told, says so, and ends the job.

A wait alone proves nothing: a collective whose step failed may look as if it were still waited for, and a peer may be
slow. What proves it is that a peer has begun fewer collectives of the name, or is not heard of any more.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import http.client
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

from sok.base import _ops, log
from sok.job import dead_peers

DEADLINE = 1800.0  # seconds
_WARN_AFTER = 60.0
_MOST_RANKS_SHOWN = 8
_SCOPE = "sok.watch"
_NEVER = 1e9  # seconds
_SECONDS_TO_END = 5.0


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a worker has begun under one name."""

    name: str
    kind: str
    begun: int  # how many
    waits: bool  # for the last of them
    seconds: float  # since the last of them began, if it waits, else since it was done


@dataclasses.dataclass(frozen=True)
class Report:
    """What one worker last told of itself."""

    collectives: dict[str, Collective]
    place: str  # where its program is
    silent: float = 0.0  # seconds that it has told nothing new, if those are more than usual
    ended: str = ""  # how its program has ended (sok/job/dead_peers.py); empty: it runs
    was_stopped: bool | None = None  # whether a callback has stopped its `fit`

    @property
    def steps(self) -> int:
        """Training steps that it has begun in this job, as far as gradients tell."""
        gradients = [one for one in self.collectives.values() if {"grads", "dense_gradients"} & {*one.name.split("/")}]
        return max((one.begun for one in gradients), default=0)

    @property
    def oldest_wait(self) -> Collective | None:
        waits = [one for one in self.collectives.values() if one.waits]
        return max(waits, key=lambda one: one.seconds, default=None)

    @property
    def last_done(self) -> Collective | None:
        done = [one for one in self.collectives.values() if not one.waits]
        return min(done, key=lambda one: one.seconds, default=None)


def lonely(reports: dict[int, Report | None], rank: int, patience: float) -> tuple[Collective, list[int]] | None:
    """The collective for which `rank` has waited at least `patience` seconds in vain, and the ranks that did not come.

    Args:
        reports: of all ranks; None of one that has told nothing yet.
    """
    mine = reports[rank]
    waits = [one for one in mine.collectives.values() if one.waits and one.seconds >= patience] if mine else []
    for one in sorted(waits, key=lambda one: -one.seconds):
        missing = [peer for peer, report in reports.items() if peer != rank and not _came(report, one, patience)]
        if missing:
            return one, missing
    return None


def _came(report: Report | None, one: Collective, patience: float) -> bool:
    if report is None or report.silent >= patience:
        return False
    its = report.collectives.get(one.name)
    return its is not None and its.begun >= one.begun


def describe(reports: dict[int, Report | None], one: Collective, missing: list[int]) -> str:
    """What waits, who came, and where each of the others is: lines for people."""
    came = [rank for rank in reports if rank not in missing]
    lines = [
        f"{one.kind} '{one.name}' (number {one.begun}) has waited for {one.seconds:.0f} s: {ranks_named(came)} came, "
        f"{ranks_named(missing)} did not."
    ]
    for rank in [*came[:1], *missing[:_MOST_RANKS_SHOWN]]:
        lines.append(f"  rank {rank} {_whereabouts(reports[rank])}")
    lines.append("  All workers must make the same lookups and updates, in the same order.")
    return "\n".join(lines)


_FEWER_BATCHES = (
    "It had fewer batches than this worker. Give all as many: sok.data.batches, or one steps_per_epoch for all."
)
_STOPPED = (
    "A callback has stopped its training (model.stop_training). All workers must stop after the same step: put "
    "sok.callbacks.MetricSumCallback before EarlyStopping, both on all workers."
)


def describe_ended(reports: dict[int, Report | None], rank: int) -> str:
    """What is known of the peers of `rank` whose programs have ended, and what to do: lines for people, or nothing."""
    mine, lines = reports[rank], []
    ended = {peer: report for peer, report in reports.items() if peer != rank and report is not None and report.ended}
    for peer, report in list(ended.items())[:_MOST_RANKS_SHOWN]:
        if report.ended == dead_peers.BY_A_PEER:
            continue
        if report.ended != dead_peers.WELL:
            lines.append(f"rank {peer} has ended with {report.ended} (its own output says where).")
            continue
        lines.append(f"rank {peer} came to the end of its program after {_steps(report)}, before this worker did.")
        if mine is not None and (last := mine.oldest_wait or mine.last_done) is not None:
            lines.append(
                f"  This worker has begun {_steps(mine)}, and came to {last.kind} '{last.name}' (number {last.begun})."
            )
        causes = {True: _STOPPED, False: _FEWER_BATCHES, None: f"{_FEWER_BATCHES} Or: {_STOPPED}"}
        lines.append(f"  {causes[report.was_stopped]}")
    return "\n".join(lines)


def _steps(report: Report) -> str:
    return f"{report.steps} training step{'' if report.steps == 1 else 's'}"


def ranks_named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS_SHOWN]))
    more = f" and {len(ranks) - _MOST_RANKS_SHOWN} more" if len(ranks) > _MOST_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _whereabouts(report: Report | None) -> str:
    if report is None:
        return "has told nothing yet: has it called sok.Init?"
    wait, done = report.oldest_wait, report.last_done
    if wait is not None:
        what = f"waits in {wait.kind} '{wait.name}' (number {wait.begun}) since {wait.seconds:.0f} s"
    elif done is not None:
        what = f"is in no collective; its last was {done.kind} '{done.name}', {done.seconds:.0f} s ago"
    else:
        what = "has begun no collective"
    silent = f" (it was last heard of {report.silent:.0f} s ago)" if report.silent else ""
    return f"{what}; its program is at {report.place}{silent}"


class Watch:
    """The thread that tells, reads and ends.

    Args:
        rank, size: of this worker.
        deadline: seconds after which a collective ends the job to which some workers have not come.
        store: 'host:port' of a key-value store that all workers reach.
        end: ends the job, for all workers.
    """

    def __init__(self, rank: int, size: int, deadline: float, store: str, end: Callable[[], None]) -> None:
        self._rank, self._size, self._deadline, self._store, self._end = rank, size, deadline, store, end
        self._warn_after = min(_WARN_AFTER, deadline / 2)
        self._interval = min(15.0, deadline / 8)
        self._stopped = threading.Event()
        self._told = 0
        self._heard: dict[int, tuple[int, float]] = {}  # of each peer: which report, and when it was new here
        self._warned: tuple[str, int] | None = None
        _ops.forget_collectives()
        self._telling = threading.Lock()
        self.verdict = ""  # why the job was ended, once it was
        # Horovod's own end comes after it, and with that the peers' errors.
        atexit.register(self._tell_end)
        threading.Thread(target=self._run, name="sok-watch", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread, soon."""
        self._stopped.set()
        atexit.unregister(self._tell_end)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            mine = _own_report()
            try:
                self._tell(mine)
                wait = mine.oldest_wait
                if wait is not None and wait.seconds >= self._warn_after:
                    self._judge(self._read_all(mine))
            except (OSError, http.client.HTTPException, ValueError):
                continue  # the launcher is busy, or gone: then it ends the job itself

    def _judge(self, reports: dict[int, Report | None]) -> None:
        found = lonely(reports, self._rank, self._deadline)
        if found is not None:
            self.verdict = f"{describe(reports, *found)}\n  The job ends here: sok.Init(deadline={self._deadline:g})."
            log.logger.error("%s", self.verdict)
            self._stopped.set()
            ending = threading.Thread(target=self._end, daemon=True)
            # The program, which fails now, may leave at once; Horovod must not be ended from two threads.
            atexit.register(ending.join, _SECONDS_TO_END)
            ending.start()
            ending.join(_SECONDS_TO_END)
            if ending.is_alive():  # the transport itself waits for a peer that is no more
                os._exit(1)
            return
        found = lonely(reports, self._rank, self._warn_after)
        if found is None:
            return
        one, missing = found
        speaker = min(rank for rank in reports if rank not in missing)
        if speaker == self._rank and self._warned != (one.name, one.begun):
            self._warned = (one.name, one.begun)
            words = describe(reports, one, missing)
            log.logger.warning("%s\n  The job ends after %g s of that.", words, self._deadline)

    def describe_ended(self) -> str:
        """What peers have told of their end: see the function."""
        mine = _own_report()
        try:
            return describe_ended(self._read_all(mine), self._rank)
        except (OSError, http.client.HTTPException, ValueError):
            return ""  # the store has ended, too

    def _tell_end(self) -> None:
        self._stopped.set()
        how, was_stopped = dead_peers.own_end()
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._tell(Report(own_collectives(), "its end", ended=how, was_stopped=was_stopped))

    def _tell(self, report: Report) -> None:
        with self._telling:
            if self._stopped.is_set() and not report.ended:
                return  # it would come after the last word
            self._told += 1
            told = [list(vars(one).values()) for one in report.collectives.values()]
            body = {"number": self._told, "collectives": told, "place": report.place}
            body |= {"ended": report.ended, "was_stopped": report.was_stopped}
            self._request("PUT", self._rank, json.dumps(body).encode())

    def _read_all(self, mine: Report) -> dict[int, Report | None]:
        return {rank: mine if rank == self._rank else self._read(rank) for rank in range(self._size)}

    def _read(self, rank: int) -> Report | None:
        body = self._request("GET", rank)
        if body is None:
            return None
        told, now = json.loads(body), time.monotonic()
        if self._heard.get(rank, (-1, now))[0] != told["number"]:
            self._heard[rank] = (told["number"], now)
        collectives = [Collective(*one) for one in told["collectives"]]
        silent = now - self._heard[rank][1]
        silent = silent if silent > 2 * self._interval else 0.0
        by_name = {one.name: one for one in collectives}
        return Report(by_name, told["place"], silent, told["ended"], told["was_stopped"])

    def _request(self, method: str, rank: int, body: bytes | None = None) -> bytes | None:
        connection = http.client.HTTPConnection(self._store, timeout=10)
        try:
            connection.request(method, f"/{_SCOPE}/{rank}", body)
            answer = connection.getresponse()
            return answer.read() if answer.status == 200 else None
        finally:
            connection.close()


def _own_report() -> Report:
    return Report(own_collectives(), own_place())


def own_collectives() -> dict[str, Collective]:
    """What this worker has begun in its job. Does not ask TensorFlow, which may hang."""
    return {name: Collective(name, *one) for name, one in json.loads(_ops.collectives()).items()}


def own_place() -> str:
    """Where the main thread is: the innermost line of the program that is neither a library's nor ours."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else [f for f, _ in traceback.walk_stack(frame)]
    for one in [f for f in frames if _is_the_programs(f)] or frames[:1]:
        return f"{one.f_code.co_filename}:{one.f_lineno} in {one.f_code.co_name}"
    return "an unknown place"


_LIBRARIES = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).resolve().parents[2]),
    "<",
)


def _is_the_programs(frame: types.FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def checked_deadline(deadline: float | str | None) -> float:
    """Seconds: the argument of `sok.Init`, else SOK_DEADLINE, else the default. 0: never.

    Raises:
        ValueError: it is no number of seconds.
    """
    said = "`deadline`"
    if deadline is None:
        said, deadline = "SOK_DEADLINE", os.environ.get("SOK_DEADLINE", "") or DEADLINE
    try:
        seconds = -1.0 if isinstance(deadline, bool) else float(deadline)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < _NEVER:
        raise ValueError(f"{said} must be seconds, at least 0 (0: wait for ever). Received: {deadline!r}.")
    return seconds
