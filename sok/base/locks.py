"""Locks that Python lacks. Knows no TensorFlow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReadersAndWriter:
    """Many threads read at the same time, or one writes. A writer that waits lets no more readers in.

    Example:
        >>> lock = ReadersAndWriter()
        >>> with lock.reading(), lock.reading():
        ...     pass
        >>> with lock.writing():
        ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers = 0  # one that writes, and those that wait
        self._is_written = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, nobody writes. A thread that reads may read once more if no writer waits; so better not."""
        with self._changed:
            self._changed.wait_for(lambda: self._writers == 0)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, nobody else reads or writes."""
        with self._changed:
            self._writers += 1
            self._changed.wait_for(lambda: self._readers == 0 and not self._is_written)
            self._is_written = True
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._is_written = False
                self._changed.notify_all()
