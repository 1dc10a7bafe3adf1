"""Checkpoints, exports and dumps under paths, and the keys in them. Loads no TensorFlow, but for an export."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator

from sok.base.types import PathLike
from sok.checkpoint import erasing
from sok.checkpoint.erasing import Record, Wanted
from sok.checkpoint.manifest import NAME, SHARD_NAME
from sok.tools import folders


@dataclasses.dataclass(frozen=True)
class Place:
    """Something that may hold rows."""

    path: str
    kind: str  # "checkpoint", "export", "unfinished save"


def places_under(paths: Iterable[PathLike]) -> list[Place]:
    """What lies at each path or in folders below it, each place once.

    Raises:
        FileNotFoundError: nothing that may hold rows is there.
        ValueError: a path is of a remote file system.
    """
    found: dict[Place, None] = {}
    for given in [os.fspath(path) for path in paths]:
        if "://" in given:
            raise ValueError(f"{given}: only folders of the system can be looked through. Mount or copy it.")
        path = os.path.abspath(given)
        if not os.path.exists(path) and os.path.isfile(f"{path}.index"):  # one checkpoint of a manager
            path += ".sok"
        here = list(_under(path))
        if not here:
            raise FileNotFoundError(f"{given}: no checkpoint, export or dump here, nor below.")
        found.update(dict.fromkeys(here))
    return list(found)


def _under(path: str) -> Iterator[Place]:
    for folder, below, names in os.walk(path):
        below.sort()
        if NAME in names:
            yield Place(folder, "checkpoint")
        elif folders.is_export(folder):
            yield Place(folder, "export")
            below.clear()
        elif any(SHARD_NAME.fullmatch(name.removesuffix(".tmp")) for name in names):
            yield Place(folder, "unfinished save")


def records_in(place: Place, wanted: Wanted) -> Iterator[Record]:
    """Where keys lie in a place, as far as that can be seen."""
    if place.kind == "checkpoint":
        yield from erasing.records(place.path, wanted)
    elif place.kind == "export":
        from sok.saved_model import erasing as exports  # loads TensorFlow

        yield from exports.records(place.path, wanted)


def what_cannot_be_said(place: Place) -> list[str]:
    """A line about a place that `records_in` cannot look into."""
    if place.kind == "unfinished save":
        return [f"{place.path}: files of a save that was never completed: not looked into."]
    if place.kind == "export":
        from sok.saved_model import erasing as exports

        if not exports.can_be_searched(place.path):
            return [f"{place.path}: does not say which of its variables are tables': not looked into."]
    return []
