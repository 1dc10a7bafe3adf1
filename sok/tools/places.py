"""Checkpoints, exports and dumps under paths, and the keys in them. Loads no TensorFlow, but for an export."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Iterable, Iterator

from sok.base.types import PathLike
from sok.checkpoint import erasing
from sok.checkpoint.erasing import Record, Wanted
from sok.checkpoint.manifest import NAME, SHARD_NAME
from sok.compat.formats import erasing as dumps
from sok.tools import folders


@dataclasses.dataclass(frozen=True)
class Place:
    """Something that may hold rows."""

    path: str
    kind: str  # "checkpoint", "export", "dump", "unfinished save", "file" (which cannot be looked into)


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
    if os.path.isfile(path):
        yield from _files(os.path.dirname(path), [os.path.basename(path)])
    for folder, below, names in os.walk(path):
        below.sort()
        if NAME in names:
            yield Place(folder, "checkpoint")
        elif folders.is_export(folder):
            yield Place(folder, "export")
            below.clear()
        elif any(SHARD_NAME.fullmatch(name.removesuffix(".tmp")) for name in names):
            yield Place(folder, "unfinished save")
        else:
            yield from _files(folder, sorted(names))


def _files(folder: str, names: Iterable[str]) -> Iterator[Place]:
    """What is one file, or some beside each other."""
    for name in names:
        if (dumped := dumps.name_in(name)) is not None:
            is_whole = all(os.path.exists(os.path.join(folder, f"{dumped}-{part}")) for part in ("key", "weight"))
            if name.endswith("-key") == is_whole:  # else by its other file, or it is of something else
                yield Place(os.path.join(folder, dumped), "dump" if is_whole else "unfinished save")
        elif name.endswith(("_keys.file", ".weights.h5", ".keras")):
            path = os.path.join(folder, name)
            if name.endswith(".file") or _has_tables(path):
                yield Place(path, "file")


def _has_tables(path: str) -> bool:
    """Whether a file of Keras has rows: their names stand in it as they are, packed or not."""
    if not os.path.getsize(path):
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(b"sok_table") >= 0


def records_in(place: Place, wanted: Wanted) -> Iterator[Record]:
    """Where keys lie in a place, as far as that can be seen."""
    if place.kind == "checkpoint":
        yield from erasing.records(place.path, wanted)
    elif place.kind == "dump":
        yield from dumps.records(place.path, wanted)
    elif place.kind == "export":
        from sok.saved_model import erasing as exports  # loads TensorFlow

        yield from exports.records(place.path, wanted)


def what_cannot_be_said(place: Place) -> list[str]:
    """A line about a place that `records_in` cannot look into."""
    if place.kind == "unfinished save":
        return [f"{place.path}: files of a save that was never completed: not looked into."]
    if place.kind == "file":
        return [f"{place.path}: a file of Keras or of SOK v1: not looked into."]
    if place.kind == "export":
        from sok.saved_model import erasing as exports

        if not exports.can_be_searched(place.path):
            return [f"{place.path}: does not say which of its variables are tables': not looked into."]
    return []
