"""The launcher of elastic jobs: starts workers, and brings those that there are together whenever some come or go.

A worker is starting, then waits for a place, then is a member of a generation: a job of so many, whose members know
each other. When no member of the last generation trains any more, those that wait form the next. A worker waits only
when its program is up, so nobody waits in Horovod for one that still starts. docs/design/elastic.md says more.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from sok.job import elastic_launcher
from sok.tools.elastic import hosts
from sok.tools.elastic.server import Answers, Store

_SECONDS_TO_END = 10.0
_SECONDS_BETWEEN_LOOKS = 0.05
STARTING, WAITING, MEMBER, ENDED = "starting", "waiting", "member", "ended"


@dataclasses.dataclass(eq=False)
class Worker:
    """A process, and where it stands.

    Args:
        number: which tells it from all others that there were.
        generation: the last one that it was in; 0: none yet.
        rank: its rank there.
        has_begun: it is connected with all others there.
        is_wanted: it may be in the next generation.
        is_given_up: this launcher has ended it itself.
    """

    number: int
    host: str
    process: subprocess.Popen[bytes]
    state: str = STARTING
    generation: int = 0
    rank: int = -1
    has_begun: bool = False
    is_wanted: bool = True
    is_given_up: bool = False
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank >= 0 else ""
        return f"worker {self.number} (host {self.host}, process {self.process.pid}{rank})"


class Launcher:
    """Runs one job.

    Args:
        options: of sok/tools/elastic/command.py.
        program: what each worker runs.
        found: where.
    """

    def __init__(self, options: argparse.Namespace, program: Sequence[str], found: hosts.Hosts) -> None:
        self._options, self._program, self._hosts = options, program, found
        self._most = options.max_np or sys.maxsize
        self._workers: list[Worker] = []
        self._changed = threading.Condition()
        self._generation = 0
        self._formed_at = self._waits_since = time.monotonic()
        self._left_since: float | None = None  # the first of the generation has left it
        self._losses = 0  # since the last commit
        self._is_ending = False  # a worker has come to the end of its program
        self._failure = ""
        self._store: Store | None = None
        all_here = options.host_discovery_script is None and all(map(hosts.is_here, found.slots))
        self._interface = options.network_interface or ("lo" if all_here else "")
        self._address = options.address or ("127.0.0.1" if self._interface == "lo" else socket.gethostname())
        self._key = secrets.token_hex(16)

    def run(self) -> int:
        """Runs it to its end; the exit status."""
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)}
        self._answers = Answers(self._address, self._key, self._answer)
        looker = threading.Thread(target=self._look_for_hosts, daemon=True)
        looker.start()
        try:
            with self._changed:
                while not self._failure and not self._is_done():
                    self._advance()
                    self._changed.wait(_SECONDS_BETWEEN_LOOKS)
        finally:
            self._end_all()
            self._answers.close()
            for which, handler in before.items():
                signal.signal(which, handler)
        if self._failure:
            _say(f"the job has failed: {self._failure}")
        return 1 if self._failure else 0

    def _stop(self, which: int, frame: Any) -> None:
        self._failure = self._failure or f"it was ended by {signal.Signals(which).name}."

    def _is_done(self) -> bool:
        return self._is_ending and all(w.state == ENDED for w in self._workers)

    def _look_for_hosts(self) -> None:
        while True:
            time.sleep(1.0)
            try:
                self._hosts.ask()
            except (OSError, ValueError) as error:
                _say(f"{error} The hosts stay as they were.")

    # What workers ask. In threads of the server.

    def _answer(self, what: str, number: int, generation: int) -> dict[str, Any]:
        with self._changed:
            worker = self._workers[number]
            if what == "place":
                return self._place(worker, generation)
            if what == "begun":
                worker.has_begun = worker.has_begun or worker.generation == generation
            elif what == "changes":
                if generation == self._generation:
                    self._losses = 0
                return {"changes": self._are_changes()}
            else:
                raise ValueError(f"nobody answers {what!r}")
            return {}

    def _place(self, worker: Worker, generation: int) -> dict[str, Any]:
        """What a worker gets that is out of `generation`: a place in a later one, or nothing yet."""
        if worker.state == STARTING or (worker.state == MEMBER and worker.generation == generation):
            worker.state, worker.has_begun = WAITING, False
            self._changed.notify_all()
        self._changed.wait_for(lambda: worker.state != WAITING, elastic_launcher.SECONDS_TO_HOLD)
        if worker.state == ENDED:
            return {"leave": True}
        if worker.state == MEMBER:
            return {"generation": worker.generation, "environment": worker.environment}
        return {}

    def _are_changes(self) -> bool:
        members, waiting = self._in(MEMBER), self._in(WAITING)
        joins = any(w.is_wanted for w in waiting) and len(members) < self._most
        left = any(w.generation == self._generation for w in waiting)  # who has heard of changes; all others shall
        return not self._is_ending and (joins or left or not all(w.is_wanted for w in members))

    def _in(self, *states: str) -> list[Worker]:
        return [w for w in self._workers if w.state in states]

    # What goes on: all in the main thread, with the lock.

    def _advance(self) -> None:
        for worker in self._in(STARTING, WAITING, MEMBER):
            if (code := worker.process.poll()) is not None:
                self._note_end(worker, code)
        if self._failure:
            return
        if self._is_ending:
            self._dismiss_those_who_wait()
        else:
            self._match_hosts()
            self._form()
        self._check_time()

    def _note_end(self, worker: Worker, code: int) -> None:
        was, worker.state = worker.state, ENDED
        if worker.is_given_up or not worker.is_wanted and was != MEMBER:
            return
        if code == 0:
            self._is_ending = True
        elif not hosts.was_lost(code, worker.host):
            self._failure = f"{worker} has ended with status {code}; its output says why."
        elif self._is_ending:
            self._failure = f"{worker} was lost while others had come to the end of their program."
        else:
            self._losses += 1
            _say(f"{worker} is lost (status {code}); the others go on from the last commit.")
            if self._losses > self._options.max_losses:
                self._failure = f"{self._losses} workers were lost, and no commit was made between."
            if was == MEMBER:
                self._left_since = self._left_since or time.monotonic()
                self._end_meeting("one of those that met is lost")

    def _end_meeting(self, why: str) -> None:
        """Ends those that wait in Horovod for one that does not come: nothing else takes them out of there."""
        met = [w for w in self._in(MEMBER) if not w.has_begun]
        for worker in met:
            self._give_up(worker, f"{why}; it is started anew")

    def _give_up(self, worker: Worker, why: str) -> None:
        _say(f"{worker} is ended: {why}.")
        worker.is_given_up, worker.state = True, ENDED
        hosts.end(worker.process, signal.SIGKILL)
        self._changed.notify_all()

    def _match_hosts(self) -> None:
        """Starts workers where there is room for more, and dismisses those that are too many."""
        room = self._most
        living = collections.defaultdict(list)
        for worker in self._in(MEMBER, WAITING, STARTING):
            living[worker.host].append(worker)
        slots = self._hosts.slots
        for host in [*slots, *(h for h in living if h not in slots)]:
            its = sorted(living[host], key=lambda w: (w.generation == 0, w.state == STARTING, w.number))
            wanted = min(slots.get(host, 0), room)
            room -= wanted
            for place, worker in enumerate(its):
                worker.is_wanted = place < wanted
                if not worker.is_wanted and worker.state == STARTING:
                    self._give_up(worker, "it is not wanted any more")
            for _ in range(wanted - len(its)):
                self._start(host)

    def _start(self, host: str) -> None:
        number = len(self._workers)
        more = {
            elastic_launcher.ADDRESS: f"{self._address}:{self._answers.port}",
            elastic_launcher.KEY: self._key,
            elastic_launcher.WORKER: str(number),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": host,
        }
        if self._interface:
            more |= {"HOROVOD_GLOO_IFACE": self._interface, "NCCL_SOCKET_IFNAME": self._interface}
        self._workers.append(Worker(number, host, hosts.start(self._program, host, more, f"[{number}] ")))

    def _form(self) -> None:
        """Makes the next generation of those that wait, once nobody is in the last one."""
        waiting = self._in(WAITING)
        if self._in(MEMBER) or not waiting:
            return
        chosen = [w for w in waiting if w.is_wanted][: self._most]
        if len(chosen) < (self._options.np if self._generation == 0 else self._options.min_np):
            return
        for worker in set(waiting) - set(chosen):
            worker.state, worker.is_given_up = ENDED, True  # it is told to leave
        if self._store is not None:
            self._store.close()
        self._store = Store(self._address)
        self._generation += 1
        self._formed_at, self._left_since = time.monotonic(), None
        for worker, environment in zip(ranked := _ranked(chosen), _environments(ranked), strict=True):
            worker.state, worker.generation = MEMBER, self._generation
            worker.rank = int(environment["HOROVOD_RANK"])
            worker.environment = environment | {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._store.port),
            }
        _say(f"{len(ranked)} workers form generation {self._generation}.")
        self._changed.notify_all()

    def _dismiss_those_who_wait(self) -> None:
        for worker in self._in(STARTING):
            self._give_up(worker, "the job is done")
        for worker in self._in(WAITING):
            if worker.generation:
                self._failure = f"{worker} goes on from the last commit, but others have come to their end."
            worker.state = ENDED
        self._changed.notify_all()

    def _check_time(self) -> None:
        now, members = time.monotonic(), self._in(MEMBER)
        if members:
            self._waits_since = now
            if any(w.state == WAITING and w.generation == self._generation for w in self._workers) or self._is_ending:
                self._left_since = self._left_since or now
            if now - self._formed_at > self._options.meeting_deadline and not all(w.has_begun for w in members):
                self._count_loss()
                self._end_meeting(f"it did not connect with the others in {self._options.meeting_deadline:g} s")
            if self._left_since is not None and now - self._left_since > self._options.deadline:
                for worker in members:
                    self._count_loss()
                    self._give_up(worker, f"it did not leave its job, as others did, in {self._options.deadline:g} s")
        elif not self._is_ending and now - self._waits_since > self._options.deadline:
            need = self._options.min_np if self._generation else self._options.np
            self._failure = (
                f"for {self._options.deadline:g} s only {len(self._in(WAITING))} workers have waited, where {need} are "
                "needed. Is there room on the hosts, and do programs come to sok.Init?"
            )

    def _count_loss(self) -> None:
        self._losses += 1
        if self._losses > self._options.max_losses:
            self._failure = f"{self._losses} workers were lost, and no commit was made between."

    def _end_all(self) -> None:
        living = [w for w in self._workers if w.process.poll() is None]
        for worker in living:
            hosts.end(worker.process, signal.SIGKILL if worker.is_given_up else signal.SIGTERM)
        end = time.monotonic() + _SECONDS_TO_END
        for worker in living:
            try:
                worker.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                hosts.end(worker.process, signal.SIGKILL)
                worker.process.wait()
        if self._store is not None:
            self._store.close()


def _ranked(workers: Sequence[Worker]) -> list[Worker]:
    """The order of their ranks: as it was, those of a host together, as Horovod wants them."""
    old_first = sorted(workers, key=lambda w: (w.generation == 0, w.rank, w.number))
    order = list(dict.fromkeys(w.host for w in old_first))
    return sorted(old_first, key=lambda w: order.index(w.host))


def _environments(workers: Sequence[Worker]) -> list[dict[str, str]]:
    """What tells Horovod of its place, for each of them, in the order of their ranks."""
    sizes = collections.Counter(w.host for w in workers)
    order, seen, found = list(sizes), collections.Counter[str](), []
    for rank, worker in enumerate(workers):
        local = seen[worker.host]
        seen[worker.host] += 1
        across = [host for host in order if sizes[host] > local]
        numbers = {"RANK": rank, "SIZE": len(workers), "LOCAL_RANK": local, "LOCAL_SIZE": sizes[worker.host]}
        numbers |= {"CROSS_RANK": across.index(worker.host), "CROSS_SIZE": len(across)}
        found.append({f"HOROVOD_{name}": str(number) for name, number in numbers.items()})
    return found


def _say(words: str) -> None:
    print(f"sok elastic: {words}", file=sys.stderr, flush=True)
