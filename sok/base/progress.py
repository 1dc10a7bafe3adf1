"""A progress bar for people, and a line every few seconds for log files."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO


class Progress:
    """Shows how far a loop is and how fast it goes.

    On a terminal one line is rewritten in place; elsewhere (a pipe, a file, under horovodrun) a line is written every
    `interval` seconds. With `enabled=False`, on all ranks but one, nothing is written.
    """

    def __init__(self, label: str, unit: str = "rows", enabled: bool = True, interval: float = 5.0,
                 stream: TextIO | None = None, total: int = 0):  # fmt: skip
        self._label, self._unit, self._enabled = label, unit, enabled
        self._total, self._done = total, 0
        self._stream = stream or sys.stdout
        self._in_place = self._stream.isatty()
        self._interval = 0.1 if self._in_place else interval
        self._shown = time.monotonic()
        self._first: tuple[float, int] | None = None  # rates count from the first call, which comes after any set-up
        self._was_shown = False

    def update(self, done: int, total: int, note: str = "") -> None:
        """Say that `done` of `total` units are done; written only when it is time to."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        if self._enabled and now - self._shown >= self._interval:
            self._shown, self._was_shown = now, True
            self._write(self._line(done, total, note, now))

    def add(self, more: int) -> None:
        """Say that so many more of the units in all are done."""
        self._done += more
        self.update(self._done, self._total)

    @contextlib.contextmanager
    def watching(self, path: str, interval: float = 0.2) -> Iterator[None]:
        """Follow how many bytes a file has while the body writes it."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(interval):
                with contextlib.suppress(OSError):
                    self.update(self._done + os.stat(path).st_size, self._total)

        thread = threading.Thread(target=follow, daemon=True)
        if self._enabled:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self._enabled:
                thread.join()
        with contextlib.suppress(OSError):
            self.add(os.stat(path.removesuffix(".tmp")).st_size)

    def __enter__(self) -> Progress:
        self.update(0, self._total)
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _line(self, done: int, total: int, note: str, now: float) -> str:
        fraction = min(done / total, 1.0) if total else 1.0
        begin, before = self._first or (now, done)
        rate = (done - before) / (now - begin) if now > begin else 0.0
        speed = f"  {human(rate)} {self._unit}/s  {(total - done) / rate:.0f} s left" if rate > 0 else ""
        filled = int(fraction * 20)
        bar = f"[{'#' * filled}{'.' * (20 - filled)}] " if self._in_place else ""
        return f"{self._label} {bar}{fraction:4.0%}{speed}  {note}".rstrip()

    def _write(self, text: str) -> None:
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + text[:width].ljust(width))
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Clear the bar, so that the next line starts at the left."""
        if self._enabled and self._in_place and self._was_shown:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + " " * width + "\r")
            self._stream.flush()


def on_stderr(label: str, total: int, show: bool | None, unit: str = "rows") -> Progress:
    """Progress of long work, to `add` to; where `show` is None, if standard error is a terminal."""
    return Progress(label, unit, sys.stderr.isatty() if show is None else show, stream=sys.stderr, total=total)


def human(number: float) -> str:
    """Return a number with three digits or so.

    >>> human(950), human(81_234), human(45_840_617)
    ('950', '81.2k', '45.8M')
    """
    for unit in ("", "k", "M"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"
