"""Progress of work on files, for people who wait."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from sok.base.progress import Progress

_SECONDS = 0.2


class FileBar:
    """Shows on rank 0's stderr how many bytes of `total` are done.

    Args:
        label: what is being done.
        total: bytes.
        rank: of this worker; others than 0 show nothing.
        wanted: whether to show it; None: if stderr is a terminal.
    """

    def __init__(self, label: str, total: int, rank: int, wanted: bool | None) -> None:
        wanted = sys.stderr.isatty() if wanted is None else wanted
        self._shown = bool(wanted) and rank == 0
        self._bar = Progress(label, "bytes", self._shown, stream=sys.stderr)
        self._total, self._done = total, 0

    def __enter__(self) -> FileBar:
        self._bar.update(0, self._total)
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.close()

    def add(self, num_bytes: int) -> None:
        """Says that so many bytes more are done."""
        self._done += num_bytes
        self._bar.update(self._done, self._total)

    @contextlib.contextmanager
    def watching(self, path: str) -> Iterator[None]:
        """Follows how a file grows while the body writes it."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(_SECONDS):
                with contextlib.suppress(OSError):
                    self._bar.update(self._done + os.stat(path).st_size, self._total)

        thread = threading.Thread(target=follow, daemon=True)
        if self._shown:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self._shown:
                thread.join()
        with contextlib.suppress(OSError):
            self.add(os.stat(path.removesuffix(".tmp")).st_size)
