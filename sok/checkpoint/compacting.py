"""`compact`: a chain of saves becomes one full checkpoint, without the tables."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

import sok
from sok.base.progress import Progress, on_stderr
from sok.base.types import PathLike
from sok.checkpoint import chains, native
from sok.checkpoint import dense as dense_weights
from sok.checkpoint.lease import Lease, LeaseLost, in_folder, utc_now
from sok.checkpoint.manifest import (
    Link,
    Manifest,
    SavedSlotSet,
    SavedTable,
    ShardFile,
    generation_after,
    read_manifest,
    write_manifest,
)

# Keys of deltas that are in memory at a time, 20 bytes each; with more, the files are read several times.
MAX_KEYS = 8 << 20


def compact(path: PathLike, *, progress: bool | None = None) -> None:
    """Makes one full checkpoint of an incremental one: `sok.restore` then reads every row once.

    What it holds stays the same, up to the rounding of what an exact Adam does to untouched rows. One process does it,
    without tables and without the job that saved, as from the command line: `sok compact PATH`. It needs 300 MB of
    memory however large the tables are, and room on the disk for the rows once more. The new checkpoint takes the old
    one's place at once, when it is complete; after an interruption the old one is whole. A job that saves into `path`
    goes on with deltas to the new one. A checkpoint without deltas stays as it is.

    Args:
        path: the folder given to `sok.save`. Nothing must be saved into it meanwhile.
        progress: whether to show a bar on stderr. None: if that is a terminal.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the manifest is damaged, or does not belong to its files (a ValueError).
        tf.errors.DataLossError: a file is damaged; with its name and the offset.
        RuntimeError: another checkpoint has taken the place of this one meanwhile. It stays.
        tf.errors.OpError, OSError: another thing that the system says.

    Not collective.

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="compacted")
        >>> table.assign([3, 5], [[1.0, 2.0], [3.0, 4.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save(folder, [table])
        ...     _ = table.erase([3])
        ...     sok.save(folder, [table], incremental=True)
        ...     sok.compact(folder)
        ...     sok.restore(folder, [table])
        ...     len(sok.checkpoint.read_manifest(folder).links), int(table.size())
        (1, 1)
    """
    path = os.path.abspath(os.fspath(path))
    manifest = read_manifest(path)
    if not manifest.before:
        return
    generation = generation_after(manifest)
    lease = Lease(in_folder(path))
    if (unfinished := lease.borrow(generation)) is not None:
        chains.remove_generation(path, unfinished)

    with on_stderr("compacting", manifest.bytes, progress, "bytes") as bar:
        rewrite(path, manifest, generation, lease, bar, same_as=manifest.generation)
    with contextlib.suppress(LeaseLost):
        chains.sweep(path, lease, manifest.links)


def rewrite(
    path: str,
    manifest: Manifest,
    generation: str,
    lease: Lease,
    bar: Progress,
    *,
    same_as: str | None = None,
    without: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Puts one full checkpoint in the place of a chain, at once; the files of the chain stay.

    Args:
        generation: of the new one.
        lease: of the folder, which is taken or borrowed.
        bar: what is read is told there.
        same_as: the generation whose rows it has; None: it has others.
        without: by the names of tables, keys [n] of their dtype that are left out with their rows.
    """

    def check() -> None:
        lease.check()
        if (found := read_manifest(path)) != manifest:
            raise RuntimeError(
                f"{path}: {found.generation} has taken the place of {manifest.generation} while it was rewritten. "
                "Nothing was changed. Do not save and compact, or erase, at the same time."
            )

    erasing = generation_after(manifest)  # what takes rows away is no file of the new checkpoint
    try:
        tables = tuple(
            _table(path, manifest, generation, number, table, bar, erasing, without.get(table.name, ()))
            for number, table in enumerate(manifest.tables)
        )
        chains.remove_generation(path, erasing)
        dense_files = manifest.dense and dense_weights.copy(path, manifest.dense, generation)
        made = dataclasses.replace(manifest, generation=generation, tables=tables, before=(), dense=dense_files)
        made = dataclasses.replace(made, sok_version=sok.__version__, created=utc_now(), same_as=same_as)
        write_manifest(path, made, check)
    except BaseException:
        chains.remove_generation(path, erasing)
        chains.remove_generation(path, generation)
        raise


def _table(
    path: str,
    manifest: Manifest,
    generation: str,
    number: int,
    table: SavedTable,
    bar: Progress,
    erasing: str,
    without: np.ndarray | Sequence[int],
) -> SavedTable:
    deltas = [file for link in manifest.links[1:] for file in link.table(table.name).files]
    passes = max(1, math.ceil((sum(file.rows + file.erased for file in deltas) + len(without)) / MAX_KEYS))
    # Keys leave as by a delta that comes last, of rows as wide as those of each file.
    last: dict[int, str] = {}
    for width in {len(table.columns_of(file)) for file in table.files if len(without)}:
        last[width] = os.path.join(path, f"{erasing}-t{number:04}-r{width:04}.shard")
        native.save_erasure(last[width], erasing, table, width, without)
    shards = []
    slot_sets: dict[str, SavedSlotSet] = {}
    for old in table.files:
        name = f"{generation}-t{number:04}-r{old.rank:04}.shard"
        files = [
            (place, os.path.join(path, file.name))
            for place, link in enumerate(manifest.links)
            for file in link.table(table.name).files
            # Whether it can hold keys that the rank of `old` held at the end.
            if _may_hold(path, table, old, manifest, link, file)
        ]
        if last:
            files.append((len(manifest.links), last[len(table.columns_of(old))]))
        summary = native.compact_shards(
            [file for _, file in files],
            [place for place, _ in files],
            generation,
            os.path.join(path, name),
            world_size=manifest.world_size,
            rank=old.rank,
            **table.placement.attributes_of(old.rank, manifest.world_size),
            hashed=table.hashed,
            passes=passes,
        )
        shards.append(ShardFile(name, old.rank, summary["rows"], summary["bytes"], summary["digest"]))
        for slot_set in summary["slot_sets"]:
            slot_sets.setdefault(slot_set["name"], SavedSlotSet(**slot_set))
        bar.add(old.bytes)
    return dataclasses.replace(table, slot_sets=tuple(slot_sets.values()), files=tuple(shards))


def _may_hold(path: str, table: SavedTable, shard: ShardFile, manifest: Manifest, link: Link, file: ShardFile) -> bool:
    """Whether a file can hold what the rank of `shard` held at the end. ValueError if it cuts rows otherwise."""
    saved = link.table(table.name)
    columns, of_file = table.columns_of(shard), saved.columns_of(file)
    if columns == of_file:
        return table.placement.may_hold(shard.rank, manifest.world_size, saved.placement, file.rank, link.world_size)
    if max(columns.start, of_file.start) < min(columns.stop, of_file.stop):
        raise ValueError(
            f"{path}: the rows of table '{table.name}' are cut in one way in {manifest.generation} and in another in "
            f"{link.generation}, which cannot be compacted. Save all rows: sok.save(..., incremental=False)."
        )
    return False
