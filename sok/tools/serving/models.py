"""All models of a server, and the threads that watch their folders."""

from __future__ import annotations

import re
import threading

from sok.tools.serving.metrics import Metrics
from sok.tools.serving.model import Model
from sok.tools.serving.refusal import Refused


class Models:
    """Models by name. `keep`: versions of each; `seconds`: between two looks at a folder. Safe from several threads."""

    def __init__(self, keep: int, seconds: float, metrics: Metrics) -> None:
        self._keep, self._seconds, self._metrics = keep, seconds, metrics
        self._models: dict[str, Model] = {}
        self._lock = threading.Lock()
        self._adding = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __getitem__(self, name: str) -> Model:
        """The model of that name.

        Raises:
            Refused: 404, there is none.
        """
        with self._lock:
            model = self._models.get(name)
        if model is None:
            raise Refused(404, f"Could not find any versions of model {name}")
        return model

    def all(self) -> list[Model]:
        with self._lock:
            return [self._models[name] for name in sorted(self._models)]

    def add(self, name: str, path: str) -> Model:
        """Loads what is at `path`, serves it under `name`, and watches the folder.

        Raises:
            Refused: there is such a model (409), nothing to serve (404), or it cannot be loaded (500).
            ValueError: the name cannot stand in a URL.
        """
        if not re.fullmatch(r"[A-Za-z0-9_.~-]+", name):
            raise ValueError(f"The name of a model must be of letters, digits and '_.~-'. Received: {name!r}.")
        model = Model(name, path, self._keep, self._metrics)
        with self._adding:
            with self._lock:
                known = self._models.get(name)
            if known is not None:
                raise Refused(409, f"There is a model {name} already, of {known.path}.")
            model.start()
            with self._lock:
                self._models[name] = model
        thread = threading.Thread(
            target=model.watch, args=(self._stop, self._seconds), name=f"watch {name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return model

    def close(self, seconds: float) -> bool:
        """Ends the watching; False if a model is still being loaded after so long."""
        self._stop.set()
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)
