"""Saves that go on beside training: each rank writes in a thread of its own, and they meet through the folder.

Collectives of such a thread would come between those of training, in another order on each rank. So the ranks tell
each other in small files what they have written, and rank 0 makes the checkpoint when all have:
docs/design/checkpoint.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from sok.checkpoint import heartbeat, writing
from sok.checkpoint.agreement import describe, exception_of, together
from sok.checkpoint.writing import Work
from sok.transport.base import Transport

_POLL_SECONDS = 0.02
# How long a program that has ended otherwise waits for ranks that may have died.
_PATIENCE_SECONDS = 60.0

# The save of this rank that nobody has waited for together with the others. The same on all ranks.
_pending: weakref.WeakKeyDictionary[Transport, AsyncSave] = weakref.WeakKeyDictionary()


class AsyncSave:
    """A save under way: `sok.save(..., asynchronous=True)`. Safe from several threads."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._error: Exception | None = None
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
            error, said = caught, describe(caught)
        if work.size == 1:
            if error is not None:
                raise error
            return work.commit([said["value"]])
        _note(self._written(work.rank), said)
        if work.rank != 0:
            self._wait(self._is_decided, rank=0)
            if (why := _noted(self._failure())) is not None:
                work.remove_files()
                raise exception_of(why, why["text"]) from error
            return None
        try:
            everything = [self._of_rank(rank) for rank in range(work.size)]
            for rank, answer in enumerate(everything):
                if "value" not in answer:
                    work.remove_files()
                    raise exception_of(answer, f"rank {rank} of {work.size}: {answer['text']}") from error
            work.commit([answer["value"] for answer in everything])
        except Exception as caught:
            _note(self._failure(), describe(caught))
            raise
        return None

    def _of_rank(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] | None = None

        def is_there() -> bool:
            nonlocal found
            found = _noted(self._written(rank))
            return found is not None

        self._wait(is_there, rank)
        return found

    def _is_decided(self) -> bool:
        if os.path.exists(self._failure()):
            return True
        found = writing.current(self.path)
        return found is not None and found.generation == self.generation

    def _wait(self, is_there: Any, rank: int) -> None:
        """Until `is_there()`, which is for `rank` to bring about."""
        ended: float | None = None
        listener = heartbeat.Listener(self._alive(rank))
        while not is_there():
            time.sleep(_POLL_SECONDS)
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


def start(transport: Transport, work: Work) -> AsyncSave:
    """Begins to write in the background what the work's tables held when it was begun."""
    save = _pending[transport] = AsyncSave(work)
    save.start()
    return save


def finish(transport: Transport, raising: bool = True) -> None:
    """Waits, with all ranks, for the save under way, if there is one. Collective then.

    Raises:
        Exception: it has failed, and not all ranks have been told; only if `raising`. Else the next call raises it.
    """
    save = _pending.get(transport)
    if save is None:
        return
    if not raising:
        if not any(together(transport, "sok/save/pending", save.failed)):
            del _pending[transport]
        return
    del _pending[transport]
    together(transport, "sok/save/pending", lambda: None if save.failed() and save.is_told else save.result())


def _note(path: str, what: dict[str, Any]) -> None:
    """Leaves something for the other ranks to read, at once as a whole."""
    partial = path + ".tmp"
    Path(partial).write_text(json.dumps(what))
    os.rename(partial, path)


def _noted(path: str) -> dict[str, Any] | None:
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
