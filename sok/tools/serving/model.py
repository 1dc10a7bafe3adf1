"""A model and its versions: which are loaded, how a newer one takes over, and what became of each."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from sok.saved_model.following import saved_at
from sok.tools.serving.metrics import Metrics
from sok.tools.serving.refusal import Refused, words_of
from sok.tools.serving.servable import Servable
from sok.tools.serving.versions import Found, versions_in

logger = logging.getLogger("sok.serve")
# Versions that are gone, or were damaged, of which the status still tells.
REMEMBERED = 10


@dataclasses.dataclass(frozen=True)
class State:
    """What became of a version, in TensorFlow Serving's words: LOADING, AVAILABLE, UNLOADING or END; and its error."""

    state: str
    error: str = ""

    def as_json(self, number: int) -> dict[str, Any]:
        status = {"error_code": "UNKNOWN" if self.error else "OK", "error_message": self.error}
        return {"version": str(number), "state": self.state, "status": status}


class Model:
    """The versions of a model at `path`; `keep` of the newest are served.

    Which versions are served changes by one assignment. A request holds the version that it began with until it ends.
    Safe from several threads: loading has a lock of its own, for which no request waits.
    """

    def __init__(self, name: str, path: str, keep: int, metrics: Metrics) -> None:
        self.name, self.path, self.keep = name, path, keep
        self._metrics = metrics
        self._lock = threading.Lock()  # of what is served; never held for long
        self._work = threading.RLock()  # of loading and unloading
        self._served: dict[int, Servable] = {}
        self._states: dict[int, State] = {}
        self._failed: dict[int, str] = {}  # stamps of damaged versions, which are not tried again as they are
        self._pinned: set[int] = set()  # older ones, loaded by request: they stay until they are unloaded
        self._held_out: set[int] = set()  # unloaded by request: they do not come back by themselves
        self._stopped = False
        self._said = ""

    # Requests.

    @contextlib.contextmanager
    def lease(self, version: int | None = None) -> Iterator[Servable]:
        """The newest version, or that one, for as long as a request needs it.

        Raises:
            Refused: 404, it is not loaded.
        """
        with self._lock:
            number = max(self._served, default=None) if version is None else version
            servable = None if number is None else self._served.get(number)
            if servable is None:
                which = f"Latest({self.name})" if version is None else f"Specific({self.name}, {version})"
                loaded = ", ".join(map(str, sorted(self._served))) or "none"
                raise Refused(404, f"Servable not found for request: {which}. Loaded versions: {loaded}.")
            servable.lend()
        try:
            yield servable
        finally:
            servable.give_back()

    def status(self, version: int | None = None) -> dict[str, Any]:
        """What became of all versions, newest first, or of one.

        Raises:
            Refused: 404, there is none.
        """
        with self._lock:
            states = dict(self._states)
        if version is not None and version not in states:
            raise Refused(404, f"Could not find version {version} of model {self.name}.")
        wanted = sorted(states, reverse=True) if version is None else [version]
        return {"model_version_status": [states[number].as_json(number) for number in wanted]}

    def loaded(self) -> list[int]:
        """The versions that are served."""
        with self._lock:
            return sorted(self._served)

    # What is served.

    def watch(self, stop: threading.Event, seconds: float) -> None:
        """Takes up what appears in the folder, until `stop` is set."""
        while not stop.wait(seconds):
            try:
                self.refresh()
                self._said = ""
            except Exception as error:  # a file system that is away for a while: what is loaded goes on
                if str(error) != self._said:
                    logger.warning("model '%s': %s", self.name, error)
                self._said = str(error)

    def refresh(self) -> None:
        """Looks at the folder once: loads what is new, warms it, puts it in its place, lets go of what it replaces.

        Raises:
            OSError: the folder cannot be read.
        """
        with self._work:
            if self._stopped:
                return
            found = versions_in(self.path)
            # What is loaded stays a candidate without its folder, which may be about to be replaced.
            numbers = (set(found) | set(self._served)) - self._held_out
            chosen: dict[int, Servable] = {}
            for number in sorted(numbers, reverse=True):
                if len(chosen) < self.keep or number in self._pinned:
                    servable = self._current(number, found.get(number))
                    if servable is not None:
                        chosen[number] = servable
            self._serve(chosen)
            self._forget(set(found))

    def start(self) -> None:
        """Serves the newest version that can be loaded.

        Raises:
            Refused: 404, there is none; 500, none of them can be loaded.
        """
        found = self._look()
        if not found:
            raise Refused(404, f"{self.path}: neither a SavedModel nor a folder of numbered ones (1/, 2/, ...).")
        self.refresh()
        if not self.loaded():
            errors = "; ".join(f"version {n}: {s.error}" for n, s in sorted(self._states.items()) if s.error)
            raise Refused(500, f"{self.path}: no version can be loaded: {errors}")

    def load(self, version: int | None = None) -> None:
        """Loads a version, also one that was damaged or unloaded, or is older; None: serves the newest again.

        Raises:
            Refused: 404, there is no such version; 500, it cannot be loaded.
        """
        with self._work:
            found = self._look()
            if version is None:
                self._held_out.clear()
                self._failed.clear()
            elif version not in found:
                there = ", ".join(map(str, sorted(found))) or "none"
                raise Refused(404, f"Model {self.name} has no version {version} at {self.path}. There are: {there}.")
            else:
                self._failed.pop(version, None)
                self._held_out.discard(version)
            self._stopped = False
            self.refresh()
            if version is not None and version not in self.loaded():  # newer ones serve: it must be kept beside them
                self._pinned.add(version)
                self.refresh()
            wanted = max(found, default=None) if version is None else version
            state = State("END", f"no version at {self.path}") if wanted is None else self._states.get(wanted)
            if state is not None and state.error:
                self._pinned.discard(wanted or 0)
                raise Refused(500, f"Version {wanted} of model {self.name} was not loaded: {state.error}")

    def unload(self, version: int | None = None) -> None:
        """Serves a version no longer, until it is loaded again; the next older one takes its place. None: all of them.

        Raises:
            Refused: 404, it is not loaded.
        """
        with self._work:
            loaded = self.loaded()
            if not loaded or (version is not None and version not in loaded):
                raise Refused(404, f"Model {self.name} has not loaded {'any' if version is None else version}.")
            self._pinned -= set(loaded) if version is None else {version}
            if version is None:
                self._stopped = True
                self._serve({})
            else:
                self._held_out.add(version)
                self.refresh()

    def _look(self) -> dict[int, Found]:
        try:
            return versions_in(self.path)
        except OSError as error:
            raise Refused(404, f"{self.path}: {error.strerror}.") from None

    def _current(self, number: int, found: Found | None) -> Servable | None:
        """The version as its files are now; as it was loaded, if they are damaged or gone."""
        old = self._served.get(number)
        if found is None or (old is not None and old.stamp == found.stamp) or self._failed.get(number) == found.stamp:
            return old
        if old is None:
            self._tell(number, State("LOADING"))
        start = time.perf_counter()
        try:
            servable = Servable(found, self._was_freed)
        except Exception as error:  # whatever a damaged file leads to: the server goes on
            words = words_of(error)
            words = words if found.path in words else f"{found.path}: {words}"
            if not isinstance(error, tf.errors.DeadlineExceededError):  # rows in Redis, which may come back
                self._failed[number] = found.stamp
            self._tell(number, State("AVAILABLE" if old else "END", words))
            self._metrics.load_failed(self.name)
            logger.error("model '%s': version %d was not loaded: %s", self.name, number, words)
            return old
        self._failed.pop(number, None)
        self._metrics.loaded(self.name, number, time.perf_counter() - start, saved_at(found.path))
        return servable

    def _serve(self, chosen: dict[int, Servable]) -> None:
        with self._lock:
            old, self._served = self._served, chosen
        for number, servable in chosen.items():
            if old.get(number) is not servable:
                self._tell(number, State("AVAILABLE"))
                logger.info("model '%s': version %d serves", self.name, number)
        if old and chosen and old.get(max(old)) is not chosen[max(chosen)]:
            self._metrics.swapped(self.name)
        for number, servable in old.items():
            if chosen.get(number) is not servable:
                if number not in chosen:
                    self._tell(number, State("UNLOADING"))
                servable.retire()

    def _was_freed(self, servable: Servable) -> None:
        with self._lock:
            if servable.number in self._served:
                return  # another one of that number
            self._states[servable.number] = State("END")
        self._metrics.freed(self.name, servable.number)
        logger.info("model '%s': version %d has left memory", self.name, servable.number)

    def _tell(self, number: int, state: State) -> None:
        with self._lock:
            self._states[number] = state

    def _forget(self, there: set[int]) -> None:
        self._failed = {number: stamp for number, stamp in self._failed.items() if number in there}
        with self._lock:
            ended = sorted(number for number, state in self._states.items() if state.state == "END")
            for number in ended[:-REMEMBERED]:
                del self._states[number]
