"""Whether a save may write what has changed alone, and which files a chain of such saves has."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sok.checkpoint.lease import Lease
from sok.checkpoint.manifest import DENSE_NAME, NAME, SHARD_NAME, Link, Manifest, read_manifest

# What ranks tell each other through the folder during an asynchronous save.
NOTE_NAME = re.compile(r"g[0-9]{6,}-[0-9a-f]{8}(-r[0-9]{4,})?\.(written|failed|alive)(\.tmp)?")
# What is not renamed yet. (A manifest of sok 0.1's first days has no generation in its name.)
MANIFEST_TMP_NAME = re.compile(re.escape(NAME) + r"(\.g[0-9]{6,}-[0-9a-f]{8})?\.tmp")


def described(path: str, manifest: Manifest | None) -> dict[str, Any] | None:
    """What all ranks have to know of the checkpoint that rank 0 finds in `path`."""
    if manifest is None:
        return None
    gone = [name for name, size in sizes_of(manifest).items() if size_of(path, name) != size]
    return {
        "names": [manifest.generation, manifest.same_as],
        "tables": sorted([table.name, table.dim, table.key_dtype] for table in manifest.tables),
        "gone": gone[:1],
        "links": len(manifest.links),
    }


def why_all_rows(
    found: dict[str, Any] | None, tables: Sequence[Any], changes: Sequence[Sequence[Any]], max_chain: int
) -> str | None:
    """Why a save into a folder has to write all rows; "" if that is as it should be, None if it need not.

    Args:
        found: what `described` says of the folder.
        tables: that are to be saved.
        changes: of each rank, for each table what the native library knows of its changes.
        max_chain: how many links a chain may have.
    """
    if found is None or found["links"] >= max_chain:
        return ""
    here = sorted([table.table_name, table.dim, table.key_dtype.name] for table in tables)
    if found["gone"]:
        return f"its file {found['gone'][0]} is gone or has another size"
    if found["tables"] != here:
        return f"it holds the tables {[name for name, *_ in found['tables']]}, not {[name for name, *_ in here]}"
    for rank, of_rank in enumerate(changes):
        for table, change in zip(tables, of_rank, strict=True):
            name = f"table '{table.table_name}' (rank {rank} of {len(changes)})"
            if not change["base"]:
                return f"{name} was neither saved before nor restored as a whole, or had no memory to note changes"
            if change["base"] not in found["names"]:
                return f"{name} was last saved or restored as {change['base']}, and there lies {found['names'][0]}"
            if not change["fits"]:
                return f"the learning rate of {name} has changed too often since the save before"
    for place, table in enumerate(tables):
        steps: dict[str, Any] = {}
        for of_rank in changes:
            for slot_set, made in of_rank[place]["steps"].items():
                if steps.setdefault(slot_set, made) != made:
                    return f"workers disagree about the steps of '{slot_set}' in table '{table.table_name}'"
    return None


def sizes_of(manifest: Manifest) -> dict[str, int]:
    """The files that a checkpoint consists of, with their bytes."""
    return {file.name: file.bytes for link in manifest.links for file in link.files}


def sweep(path: str, lease: Lease, of: Iterable[Link] | None = None) -> Manifest | None:
    """Removes what is not of the checkpoint that lies there: the one before, and what interrupted saves have left.

    Or only what is of those links: the job that saves there may be writing others.

    In this order, in which no job that has lost the lease removes files of the one that took it, nor brings a manifest
    into place whose files are gone: docs/design/checkpoint.md.

    Returns:
        What lies there.
    """
    names = os.listdir(path)
    for name in filter(MANIFEST_TMP_NAME.fullmatch, names):
        remove(path, name)  # so that its job cannot rename it any more
    manifest = current(path)
    lease.check()
    kept = {link.generation for link in manifest.links} if manifest is not None else set()
    old = None if of is None else {link.generation for link in of}
    for name in names:
        match = SHARD_NAME.fullmatch(name.removesuffix(".tmp"))
        is_old = match is not None and match[1] not in kept and (old is None or match[1] in old)
        if dense := DENSE_NAME.fullmatch(name):  # of the newest save alone
            is_newest = manifest is not None and dense[1] == manifest.generation
            is_old = not is_newest and (old is None or dense[1] in old)
        if is_old or (old is None and NOTE_NAME.fullmatch(name)):
            remove(path, name)
    return manifest


def remove_generation(path: str, generation: str) -> None:
    """Removes the shards that one save has written, unless it became the checkpoint."""
    manifest = current(path)
    if manifest is not None and generation in (link.generation for link in manifest.links):
        return
    for name in os.listdir(path):
        if name.startswith((f"{generation}-t", f"{generation}-dense.")):
            remove(path, name)


def current(path: str) -> Manifest | None:
    """The checkpoint that is there; None without one."""
    try:
        return read_manifest(path)
    except FileNotFoundError:
        return None


def remove(path: str, name: str) -> None:
    """Removes a file, if it is there and can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, name))


def size_of(path: str, name: str) -> int | None:
    """Bytes of a file; None if it is not there."""
    try:
        return os.path.getsize(os.path.join(path, name))
    except OSError:
        return None
