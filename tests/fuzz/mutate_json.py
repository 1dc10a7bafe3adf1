"""Changes to JSON that stay JSON, and manifests with a checksum that is right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from sok.checkpoint.manifest import checksum

_NUMBERS = (0, 1, -1, 2**31, 2**63, -(2**63) - 1, 1 << 200, 0.5, 1e308, float("nan"))
_VALUES = (None, True, False, *_NUMBERS, "", "../x", [], {})


def changed(data: bytes, rng: random.Random, mutate_bytes: Callable[[bytes], bytes]) -> bytes:
    """`data` with a value somewhere replaced, removed, repeated or renamed. One time in eight bytes are changed."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data)
    if not isinstance(body, dict) or rng.random() < 1 / 8:
        return mutate_bytes(data)
    body.pop("checksum", None)
    for _ in range(rng.randint(1, 3)):
        _change(body, rng, mutate_bytes)
    try:
        return json.dumps({**body, "checksum": checksum(body)}).encode()
    except (ValueError, RecursionError):  # an integer of too many digits
        return data


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each place of a value inside: its container and key."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, part in inside:
        found += [(value, key), *_places(part)]
    return found


def _change(body: dict[str, Any], rng: random.Random, mutate_bytes: Callable[[bytes], bytes]) -> None:
    places = _places(body)
    if not places:
        return
    container, key = rng.choice(places)
    value = container[key]
    match rng.randrange(6):
        case 0:
            container[key] = rng.choice(_VALUES)
        case 1:
            del container[key]
        case 2 if isinstance(container, list):
            container.append(value)
        case 3:
            other, other_key = rng.choice(places)
            if other_key in other if isinstance(other, dict) else other_key < len(other):
                container[key] = json.loads(json.dumps(other[other_key]))
        case 4 if isinstance(container, dict):
            container[mutate_bytes(str(key).encode()).decode(errors="replace")] = container.pop(key)
        case _:
            if isinstance(value, str):
                container[key] = mutate_bytes(value.encode()).decode(errors="replace")
            elif isinstance(value, (int, float)):
                container[key] = value + rng.choice((-1, 1, 2**31, 2**63))
