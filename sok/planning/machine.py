"""What a machine can do, in the units of the cost model: a file of constants, measured or published."""

from __future__ import annotations

import dataclasses
import json
import os
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SHIPPED = Path(__file__).with_name("machines")
DEFAULT = "cpu_2_cores"
"""What is taken where nothing was measured."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A collective between ranks: seconds before the first byte, and bytes a second that a rank sends."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(f"a link must have a latency of 0 s or more and a bandwidth above 0. Received: {self}.")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of one worker and of the links to its peers.

    Attributes:
        name, source: what it is, and who says so.
        gather: row bytes -> bytes a second at which rows are read at random places.
        update: record bytes -> bytes a second at which records are read, changed and written at random places.
        stream: bytes a second, one after the other, or from the cache.
        unique: ids a second whose distinct keys are found.
        probe: keys a second that are found in a table.
        flops: dense floating-point operations a second.
        copied: bytes a second of tables of which each rank has a copy, all of whose rows a step changes.
        per_table: seconds that each table costs a step on every rank, whatever its size.
        per_piece: seconds that each piece of a table costs a step on the rank that owns it, whatever its size.
        per_step: seconds that each step costs.
        within, between: all-to-all of ranks on one host, and on several.
        all_reduce_within, all_reduce_between: the same for the sum of dense gradients.
        memory: bytes of one worker.
        measured: how, if it was measured, on the machine that has the file.

    Example:
        >>> machine = load("a100")
        >>> machine.gather_rate(32) < machine.gather_rate(100) < machine.gather_rate(4096)
        True
    """

    name: str
    source: str
    gather: Mapping[int, float] = dataclasses.field(hash=False)
    update: Mapping[int, float] = dataclasses.field(hash=False)
    stream: float
    unique: float
    probe: float
    flops: float
    copied: float
    per_table: float
    per_piece: float
    per_step: float
    within: Link
    between: Link
    all_reduce_within: Link
    all_reduce_between: Link
    memory: int
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def gather_rate(self, row_bytes: float) -> float:
        return _between(self.gather, row_bytes)

    def update_rate(self, record_bytes: float) -> float:
        return _between(self.update, record_bytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return dataclasses.asdict(self)


def _between(rates: Mapping[int, float], size: float) -> float:
    """The rate at `size`, on a straight line between those measured; beyond them that of the nearest."""
    sizes = sorted(rates)
    place = bisect_left(sizes, size)
    if place == 0 or place == len(sizes):
        return rates[sizes[min(place, len(sizes) - 1)]]
    low, high = sizes[place - 1], sizes[place]
    share = (size - low) / (high - low)
    return rates[low] * (1 - share) + rates[high] * share


def from_dict(content: Mapping[str, Any], path: object = "machine") -> Machine:
    """The machine that a file describes.

    Raises:
        ValueError: a constant is missing, is not known or is not above 0.
    """
    known = {field.name for field in dataclasses.fields(Machine)}
    wrong = sorted(known - {"measured"} - set(content)) or sorted(set(content) - known)
    if wrong:
        what = f"lacks {wrong[0]!r}" if wrong[0] in known else f"has unknown {wrong[0]!r}"
        raise ValueError(f"{path}: {what}. `sok doctor --measure` writes such a file anew.")
    values = dict(content)
    for name in ("within", "between", "all_reduce_within", "all_reduce_between"):
        values[name] = Link(**values[name])
    for name in ("gather", "update"):
        values[name] = {int(size): float(rate) for size, rate in values[name].items()}
        if not values[name] or min(values[name].values()) <= 0:
            raise ValueError(f"{path}: {name!r} must have rates above 0. It has: {values[name]}.")
    for name in ("stream", "unique", "probe", "flops", "copied", "memory"):
        if values[name] <= 0:
            raise ValueError(f"{path}: {name!r} must be above 0. It is: {values[name]}.")
    return Machine(**values)


def shipped() -> list[str]:
    """Names of the machines that come with sok, each with its source.

    Example:
        >>> shipped()
        ['a100', 'cpu_2_cores', 'h100']
    """
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def measured_path() -> Path:
    """Where `sok doctor --measure` writes, and what is taken first: SOK_MACHINE, or a file of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SOK_MACHINE") or Path(cache) / "sok" / "machine.json")


def load(machine: Machine | str | os.PathLike[str] | None = None) -> Machine:
    """Reads a machine.

    Args:
        machine: a path; a name of `shipped()`; None: what was measured here, else 'cpu_2_cores'.

    Raises:
        ValueError: there is none of that name, or the file is not in order.
    """
    if isinstance(machine, Machine):
        return machine
    if machine is None:
        path = measured_path() if measured_path().exists() else _SHIPPED / f"{DEFAULT}.json"
    else:
        path = _SHIPPED / f"{machine}.json" if str(machine) in shipped() else Path(machine)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`machine` must be a file or one of {', '.join(shipped())}: {error}") from error
    return from_dict(content, path)


def save(machine: Machine, path: os.PathLike[str] | str) -> None:
    """Writes a machine, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    beside.write_text(json.dumps(machine.as_dict(), indent=2) + "\n", encoding="utf-8")
    beside.replace(target)
