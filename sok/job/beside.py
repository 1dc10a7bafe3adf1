"""A thread beside the program, in which collectives run that peers may never come to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Beside:
    """Does one thing after the other, in a thread of its own, which keeps no program from ending.

    Args:
        name: of the thread.

    Example:
        >>> beside = Beside("example")
        >>> beside.submit(max, 1, 2).result()
        2
        >>> beside.last = lambda: print("told")
        >>> beside.leave().result()
        told
    """

    def __init__(self, name: str) -> None:
        self.last: Callable[[], None] = lambda: None  # to be done when it ends: tells peers so
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._left: Future[None] | None = None
        self._is_in_task = False

    def submit(self, do: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Has it done after all that was submitted before. RuntimeError once it was told to leave."""
        if self._left is not None:
            raise RuntimeError(f"{self._thread.name} has ended, as its job, or the program, has.")
        if self._thread.ident is None:
            self._thread.start()
        return self._put(do, *arguments)

    def leave(self) -> Future[None]:
        """Ends the thread once it has done what was submitted, as peers do, and `last`."""
        if self._left is None:
            self._left = self._put(self.last)
            self._tasks.put(None)
            if self._thread.ident is None:
                self._left.set_result(None)
        return self._left

    @property
    def is_in_task(self) -> bool:
        """Whether it is in something else than `last`."""
        return self._is_in_task

    def _put(self, do: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, do, arguments))
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, do, arguments = task
            self._is_in_task = future is not self._left
            try:
                future.set_result(do(*arguments))
            except BaseException as error:
                future.set_exception(error)
            self._is_in_task = False
            del task, future, do, arguments  # while it waits for the next
