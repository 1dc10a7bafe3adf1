"""What a worker of an elastic job asks its launcher (`sok elastic`): its place in the job, and whether others wait."""

from __future__ import annotations

import http.client
import json
import os
from typing import Any

# What the launcher tells each worker by its environment.
ADDRESS, KEY, WORKER = "SOK_ELASTIC_LAUNCHER", "SOK_ELASTIC_KEY", "SOK_ELASTIC_WORKER"
SECONDS_TO_HOLD = 10.0  # for which the launcher keeps a worker that waits; this then asks again
_SECONDS_TO_ANSWER = 300.0  # of a launcher on a machine that is very busy

_generation = 0  # of the place that this worker has, or had last


def is_there() -> bool:
    """Whether a launcher of elastic jobs has started this process."""
    return ADDRESS in os.environ


def take_place() -> None:
    """Waits for a place in the next job, and tells Horovod of it by the environment.

    Raises:
        SystemExit: with status 0: this worker is not wanted any more.
        RuntimeError: the launcher does not answer.
    """
    global _generation
    while True:
        answer = _ask("place")
        if answer.get("leave"):
            raise SystemExit(0)
        if "environment" in answer:
            break
    _generation = answer["generation"]
    os.environ.update(answer["environment"])


def tell_begun() -> None:
    """Says that this worker is connected with all others of its job."""
    _ask("begun")


def has_changes() -> bool:
    """Whether workers wait to join, or are to leave. Asked at a commit, which the launcher so hears of."""
    return bool(_ask("changes")["changes"])


def _ask(what: str) -> dict[str, Any]:
    said = {"key": os.environ.get(KEY, ""), "worker": int(os.environ[WORKER]), "what": what, "generation": _generation}
    connection = http.client.HTTPConnection(os.environ[ADDRESS], timeout=_SECONDS_TO_ANSWER)
    try:
        connection.request("POST", "/", json.dumps(said))
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"The launcher of this job ({os.environ[ADDRESS]}) refuses '{what}': {text.decode()}")
        found: dict[str, Any] = json.loads(text)
        return found
    except (OSError, http.client.HTTPException, ValueError) as error:
        # Without the words of the error: "Connection reset by peer" is what a lost worker leads to.
        raise RuntimeError(
            f"The launcher of this job ({os.environ[ADDRESS]}) does not answer ({type(error).__name__}). Start it "
            "anew: the job goes on from its last commit."
        ) from None
    finally:
        connection.close()
