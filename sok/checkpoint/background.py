"""Saves that go on beside training: each rank writes in a thread of its own, and they meet through the folder.

Collectives of such a thread would come between those of training, in another order on each rank. So the ranks tell
each other in small files what they have written, and rank 0 makes the checkpoint when all have:
docs/design/checkpoint.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

from sok.checkpoint import chains, heartbeat
from sok.checkpoint import manifest as manifests
from sok.checkpoint.writing import Work
from sok.job.agreement import describe, exception_of, first_error, together
from sok.job.job import Job

_POLL_SECONDS, _MAX_POLL_SECONDS = 0.02, 0.2
_ROOM = 4096  # for the words of an error
# How long a program that has ended otherwise waits for ranks that may have died.
_PATIENCE_SECONDS = 60.0

# Saves that nobody has waited for, each with its job. Of one job: the same on all ranks.
_pending: list[tuple[weakref.ref[Job], AsyncSave]] = []


class AsyncSave:
    """A save under way: `sok.save(..., asynchronous=True)`. Safe from several threads."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._error: Exception | None = None
        self._seen: tuple[int, ...] | None = None  # the manifest that was looked at last
        self._is_in_place = False  # whether it was ours
        self.is_told = False  # somebody has seen the error
        self._thread = threading.Thread(target=self._run, name=f"sok.save {work.generation}")

    @property
    def path(self) -> str:
        """The folder."""
        return self._work.path

    @property
    def generation(self) -> str:
        """What the checkpoint will be called."""
        return self._work.generation

    def done(self) -> bool:
        """Whether it is over, well or not. Does not wait."""
        return not self._thread.is_alive()

    def progress(self) -> float:
        """How much of this worker's rows is written, in [0, 1]; 1 only when the checkpoint is in place, or failed."""
        if self.done():
            return 1.0
        return min(0.99, self._work.bytes_written() / max(1, self._work.expected_bytes))

    def result(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is in place.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: it is still under way.
            ConnectionError: another worker has died: nothing was heard of it for two minutes.
            Exception: it has failed, on this or another worker: as of `sok.save`. The old checkpoint is whole, and the
                next incremental save holds what has changed since that one.

        Not collective.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f"{self.path}: {self.generation} is still being written after {timeout} s.")
        if self._error is not None:
            self.is_told = True
            raise self._error

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def raise_untold(self) -> None:
        """Waits, and raises what went wrong if nobody has seen it."""
        if not (self.failed() and self.is_told):
            self.result()

    @property
    def error(self) -> Exception | None:
        """What went wrong, if it is over."""
        return self._error

    def failed(self) -> bool:
        """Waits, and says whether it went wrong; raises nothing."""
        self._thread.join()
        return self._error is not None

    def _run(self) -> None:
        try:
            with self._heartbeat():
                self._write_and_meet()
        except Exception as error:
            self._error = error
        try:
            self._work.end(complete=self._error is None)
        except Exception as error:  # the tables are gone, say
            self._error = self._error or error

    def _heartbeat(self) -> contextlib.AbstractContextManager:
        alone = self._work.size == 1
        return contextlib.nullcontext() if alone else heartbeat.Heartbeat(self._alive(self._work.rank))

    def _write_and_meet(self) -> None:
        work = self._work
        error: Exception | None = None
        try:
            said: dict[str, Any] = {"value": work.write()}
        except Exception as caught:  # whatever it is, the peers must not wait for this rank
            work.remove_files()
            error, said = caught, {"error": describe(caught)}
        if work.size == 1:
            if error is not None:
                raise error
            return work.commit([said["value"]])
        try:
            _note(self._written(work.rank), said)
        except OSError as caught:
            work.lease.check()  # if another job has removed the file, that is what is wrong
            raise error or caught from None
        if work.rank != 0:
            self._wait(self._is_decided, rank=0)
            if (why := _noted(self._failure())) is not None:
                work.remove_files()
                raise exception_of(why["error"]) from error
            return None
        try:
            everything = [self._of_rank(rank) for rank in range(work.size)]
            if failed := first_error([answer.get("error", "") for answer in everything]):
                work.remove_files()
                raise exception_of(failed) from error
            work.commit([answer["value"] for answer in everything])
        except Exception as caught:
            with contextlib.suppress(OSError):  # another job may have removed it, which the others see, too
                _note(self._failure(), {"error": describe(caught)})
            raise
        return None

    def _of_rank(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def is_there() -> bool:
            nonlocal found
            found = _noted(self._written(rank)) or {}
            return bool(found)

        self._wait(is_there, rank)
        return found

    def _is_decided(self) -> bool:
        if os.path.exists(self._failure()):
            return True
        if (stamp := manifests.stamp(self.path)) != self._seen:
            self._seen = stamp  # taken before it is read: what comes in between is seen the next time
            found = chains.current(self.path)
            self._is_in_place = found is not None and found.generation == self.generation
        return self._is_in_place

    def _wait(self, is_there: Any, rank: int) -> None:
        """Until `is_there()`, which is for `rank` to bring about."""
        ended: float | None = None
        listener = heartbeat.Listener(self._alive(rank))
        pause = _POLL_SECONDS
        while not is_there():
            time.sleep(pause)
            pause = min(1.2 * pause, _MAX_POLL_SECONDS)
            if not is_there():
                self._work.lease.check()  # another job may have removed what is waited for
            if (silent := listener.silent_for()) > heartbeat.PATIENCE_SECONDS and not is_there():
                raise ConnectionError(
                    f"{self.path}: rank {rank} of {self._work.size} has not been heard of for {silent:.0f} s while "
                    f"{self.generation} was written: it has probably died. The checkpoint before this one is whole."
                )
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
                if time.monotonic() - ended > _PATIENCE_SECONDS:
                    raise RuntimeError(
                        f"{self.path}: the program has ended, and other workers have not finished {self.generation}."
                    )

    def _written(self, rank: int) -> str:
        return os.path.join(self.path, f"{self.generation}-r{rank:04}.written")

    def _alive(self, rank: int) -> str:
        return os.path.join(self.path, f"{self.generation}-r{rank:04}.alive")

    def _failure(self) -> str:
        return os.path.join(self.path, f"{self.generation}.failed")


def reserve(work: Work) -> None:
    """Makes the files in which this rank will tell the others how it went, with room: the disk may be full by then."""
    if work.size == 1:
        return
    save = AsyncSave(work)
    heartbeat.reserve(save._alive(work.rank))
    _reserve(save._written(work.rank), work.room_for_summaries())
    if work.rank == 0:
        _reserve(save._failure(), _ROOM)


def discard(work: Work) -> None:
    """Removes what `reserve` has made, if there will be no save."""
    save = AsyncSave(work)
    for path in (save._alive(work.rank), f"{save._written(work.rank)}.tmp", f"{save._failure()}.tmp"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def start(job: Job, work: Work) -> AsyncSave:
    """Begins to write in the background what the work's tables held when it was begun."""
    save = AsyncSave(work)
    _pending.append((weakref.ref(job), save))
    save.start()
    return save


def finish(job: Job, raising: bool = True) -> None:
    """Waits, with all ranks, for the save under way, if there is one. Collective then.

    Raises:
        Exception: it has failed, and not all ranks have been told; only if `raising`. Else the next call raises it.
    """
    for entry in list(_pending):
        job_of_save, save = entry
        job_then = job_of_save()
        if job_then is job:
            if not raising:
                if not any(together(job.transport, "sok/save/pending", save.failed)):
                    _pending.remove(entry)
                continue
            _pending.remove(entry)
            together(job.transport, "sok/save/pending", save.raise_untold)
        elif job_then is None or job_then.has_ended:
            # Of a job that this process has shut down. The ranks of that one meet in the folder alone.
            _pending.remove(entry)
            if save.failed() and not save.is_told:
                warnings.warn(f"An asynchronous save of the job before has failed: {save.error}", stacklevel=3)


def _reserve(path: str, num_bytes: int) -> None:
    try:
        with open(path + ".tmp", "wb", buffering=0) as file:
            if file.write(b" " * num_bytes) < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())  # some file systems find room only then
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from None


def _note(path: str, what: dict[str, Any]) -> None:
    """Leaves something for the other ranks to read, at once as a whole, in the room that was reserved."""
    partial = path + ".tmp"
    data = json.dumps(what).encode()
    with open(partial, "r+b", buffering=0) as file:
        room = os.fstat(file.fileno()).st_size
        if "error" in what and len(data) > room:  # an error: of its words as many as fit
            what = {**what, "error": what["error"].encode(errors="replace")[: room // 2].decode(errors="ignore")}
            data = json.dumps(what, ensure_ascii=False).encode()
        if file.write(data.ljust(room)) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), partial)
    os.rename(partial, path)


def _noted(path: str) -> dict[str, Any] | None:
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # another host has renamed it just now: look again
            return None
        raise
