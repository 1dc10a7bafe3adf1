"""Reads the timeline that Horovod writes: how long each collective waited for other ranks, how long it moved data."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[dict[str, Any]]:
    """The events of a timeline, also of one whose end was not written."""
    text = text.strip().rstrip(",")
    if not text.endswith("]"):
        text += "]"
    return [event for event in json.loads(text) if event]


def by_tensor(text: str, steps: int) -> dict[str, dict[str, float]]:
    """For each tensor `wait_ms` (negotiation) and `move_ms` (the operation) of a step."""
    names: dict[Any, str] = {}
    opened: dict[Any, list[tuple[str, float]]] = {}
    found: dict[str, dict[str, float]] = {}
    for event in events(text):
        who = event.get("pid")
        if event.get("ph") == "M" and event.get("name") == "process_name":
            # Horovod writes '/' as '>'. The first one says when the timeline began instead of a name.
            names[who] = event.get("args", {}).get("name", str(who)).replace(">", "/")
        elif event.get("ph") == "B":
            opened.setdefault(who, []).append((event.get("name", ""), event["ts"]))
        elif event.get("ph") == "E" and opened.get(who):
            name, start = opened[who].pop()
            if opened[who]:
                continue  # a part of what is still open
            figure = "wait_ms" if name.startswith("NEGOTIATE") else "move_ms"
            took = found.setdefault(names.get(who, str(who)), {"wait_ms": 0.0, "move_ms": 0.0})
            took[figure] += (event["ts"] - start) / 1e3 / steps
    return found
