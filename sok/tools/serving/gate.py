"""How many requests a server takes at a time, and how large and slow they may be."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from sok.tools.serving.refusal import Refused


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of each request its bytes and seconds; of all together how many there may be, and how many run at once."""

    request_bytes: int
    seconds: float
    requests: int
    threads: int


class Gate:
    """Counts the requests that are inside. A request that took too long stays inside until its thread is free again.

    >>> gate = Gate(1)
    >>> gate.enter()
    >>> gate.enter()
    Traceback (most recent call last):
    sok.tools.serving.refusal.Refused: The server has 1 requests at once already (--max-requests). Ask again later.
    """

    def __init__(self, most: int, tell: Callable[[int], None] = lambda inside: None) -> None:
        self._most, self._tell = most, tell
        self._lock = threading.Lock()
        self._inside = 0

    def enter(self) -> None:
        """Raises:
        Refused: 429, there are too many.
        """
        with self._lock:
            if self._inside >= self._most:
                raise Refused(
                    429, f"The server has {self._most} requests at once already (--max-requests). Ask again later."
                )
            self._inside += 1
            self._tell(self._inside)

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            self._tell(self._inside)
