"""How long the collectives of a profile took."""

from __future__ import annotations

import json


def by_collective(text: str, steps: int) -> dict[str, dict[str, float]]:
    """For each collective the milliseconds of a step, `took_ms`, from its begin to its end.

    Args:
        text: what `sok.profile` wrote.
        steps: how many steps it saw.

    Example:
        >>> begin = {"ph": "b", "ts": 10.0, "id2": {"local": "1"}, "args": {"collective": "sok/keys"}}
        >>> end = {"ph": "e", "ts": 2010.0, "id2": {"local": "1"}}
        >>> by_collective(json.dumps({"traceEvents": [begin, end]}), steps=2)
        {'sok/keys': {'took_ms': 1.0}}
    """
    begun: dict[str, dict] = {}
    found: dict[str, dict[str, float]] = {}
    for event in sorted(json.loads(text)["traceEvents"], key=lambda event: (event.get("ts", 0.0), event["ph"] == "e")):
        if event["ph"] == "b":
            begun[event["id2"]["local"]] = event
        elif event["ph"] == "e" and event["id2"]["local"] in begun:
            begin = begun.pop(event["id2"]["local"])
            took = found.setdefault(begin["args"]["collective"], {"took_ms": 0.0})
            took["took_ms"] += (event["ts"] - begin["ts"]) / 1e3 / steps
    return found
