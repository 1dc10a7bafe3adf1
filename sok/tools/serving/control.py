"""What an operator can have a server do while it runs: load and unload models and versions."""

from __future__ import annotations

import json
from typing import Any

from sok.tools.serving.models import Models
from sok.tools.serving.refusal import Refused


def load(models: Models, name: str, version: int | None, body: bytes) -> dict[str, Any]:
    """Loads a version of a model, or the newest, and waits for it. {"path": FOLDER}: a model that is not there yet.

    Raises:
        Refused: with the status and words for the client.
    """
    path = _path_in(body)
    if path is not None:
        if version is not None:
            raise Refused(400, "A new model is loaded without /versions/N: the newest version is served.")
        try:
            models.add(name, path)
        except ValueError as error:
            raise Refused(400, str(error)) from None
    else:
        models[name].load(version)
    return models[name].status()


def unload(models: Models, name: str, version: int | None, body: bytes) -> dict[str, Any]:
    """Serves a version, or the whole model, no longer. Requests that have begun end as they would have.

    Raises:
        Refused: 404, it is not loaded.
    """
    model = models[name]
    model.unload(version)
    return model.status()


COMMANDS = {"load": load, "unload": unload}


def _path_in(body: bytes) -> str | None:
    if not body.strip():
        return None
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"JSON Parse error: {error}") from None
    if not isinstance(told, dict) or set(told) - {"path"} or not isinstance(told.get("path", ""), str):
        raise Refused(400, 'The request must be empty, or {"path": FOLDER} for a model that is not there yet.')
    return told.get("path")
