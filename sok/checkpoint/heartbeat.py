"""How ranks that meet through a folder, and in no collective, learn that one of them has died."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from pathlib import Path

BEAT_SECONDS = 1.0
# A rank that is silent for so long is taken for dead. Network file systems show changes up to a minute late.
PATIENCE_SECONDS = 120.0


class Heartbeat:
    """While it is open, the file says another number every second; afterwards it is gone."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"sok heartbeat {path}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _beat(self) -> None:
        for number in itertools.count(1):
            with contextlib.suppress(OSError):
                _write(self._path, number)
            if self._over.wait(BEAT_SECONDS):
                return


def reserve(path: str) -> None:
    """Makes the file, so that a disk that fills up does not stop the heart: it is written over in place."""
    _write(path, 0)


def _write(path: str, number: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, f"{number:20}".encode())
    finally:
        os.close(descriptor)


class Listener:
    """Whether the heart of another rank beats. Clocks of hosts differ, so that only changes count."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = ""
        self._heard = self._looked = time.monotonic()

    def silent_for(self) -> float:
        """Seconds since the last change that was seen. Looks once a second at most."""
        now = time.monotonic()
        if now - self._looked >= BEAT_SECONDS:
            self._looked = now
            with contextlib.suppress(OSError):
                said = Path(self._path).read_text()
                if said != self._last:
                    self._last, self._heard = said, now
        return now - self._heard
