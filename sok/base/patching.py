"""What a thread is inside of, and classes and modules of other libraries that are changed meanwhile.

TensorFlow and Keras have no hooks where scripts for SOK v1 and DeepRec expect `sok` to act, nor for tracing a function
anew. What is replaced there, `Patch` replaces and puts back; no other module touches what is not ours.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_ABSENT = object()


class Here(threading.local):
    """What a thread has entered; the others see nothing of it."""

    values: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        """What it has entered last; None outside."""
        return self.values[-1] if self.values else None

    @contextlib.contextmanager
    def inside(self, value: Any) -> Iterator[None]:
        """The body is inside of `value`."""
        before, self.values = self.values, (*self.values, value)
        try:
            yield
        finally:
            self.values = before

    @contextlib.contextmanager
    def back_to(self, count: int) -> Iterator[None]:
        """The body is inside of the first `count` values alone."""
        before, self.values = self.values, self.values[:count]
        try:
            yield
        finally:
            self.values = before


class Patch:
    """Attributes of others' classes and modules that are replaced as long as any thread needs it.

    Args:
        wanted: gives the owner and name of each attribute, and what makes of the present one (None: there is none) the
            one that takes its place. It is asked again by whoever begins: a library may have been imported in between.
    """

    def __init__(self, wanted: Callable[[], Iterable[tuple[Any, str, Callable[[Any], Any]]]]) -> None:
        self._wanted = wanted
        self._lock = threading.RLock()
        self._users = 0
        self._replaced: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # owner, name and what was there

    def begin(self) -> None:
        """Replaces what is not replaced yet; to be followed by `end`."""
        with self._lock:
            for owner, name, replace in self._wanted():
                if (id(owner), name) not in self._replaced:
                    # What a class inherits it has not itself.
                    own = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
                    self._replaced[id(owner), name] = owner, name, own
                    setattr(owner, name, replace(getattr(owner, name, None)))
            self._users += 1

    def end(self) -> None:
        """Puts everything back when nobody else needs it."""
        with self._lock:
            self._users -= 1
            while not self._users and self._replaced:
                owner, name, own = self._replaced.popitem()[1]
                if own is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)

    def install(self) -> None:
        """`begin`, until `uninstall`. Does nothing where that was done."""
        with self._lock:
            if not self._users:
                self.begin()

    def uninstall(self) -> None:
        """Takes `install` back. Does nothing where nothing is installed."""
        with self._lock:
            if self._users:
                self.end()

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """`begin` and `end` around the body."""
        self.begin()
        try:
            yield
        finally:
            self.end()
