"""Keys in checkpoints: where they lie, and a checkpoint without them. Finding loads no TensorFlow."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping

import numpy as np

from sok.base.errors import CheckpointError
from sok.checkpoint import chains
from sok.checkpoint.lease import Lease, in_folder
from sok.checkpoint.manifest import SHARD_NAME, Manifest, generation_after, read_manifest, sync_folder
from sok.checkpoint.shard_blocks import found_in, keys_of, words_of
from sok.table.policies import CANDIDATES, FILTER


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Keys that are looked for: some in all tables, or each table's own."""

    everywhere: tuple[int, ...] = ()
    of_tables: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def words(self, table: str, key_dtype: str) -> np.ndarray:
        """Those of a table as a file of its key dtype has them: [n] uint64, rising. Keys that do not fit are none."""
        if table.endswith(FILTER):  # its keys are those of buckets
            return words_of((), key_dtype)
        return words_of(self.of_tables.get(table.removesuffix(CANDIDATES), self.everywhere), key_dtype)

    @property
    def all(self) -> frozenset[int]:
        """The keys of any table."""
        return frozenset(self.everywhere).union(*self.of_tables.values())


@dataclasses.dataclass(frozen=True)
class Record:
    """That a key is in a file."""

    path: str  # of the checkpoint, export or dump
    table: str
    key: int
    is_row: bool  # or only the note that it was erased
    save: str = ""  # of a checkpoint: its generation
    is_delta: bool = False
    step: int | None = None  # of the table

    def __str__(self) -> str:
        what = "a row" if self.is_row else "noted as erased"
        save = f" of {'delta' if self.is_delta else 'full save'} {self.save}" if self.save else ""
        step = "" if self.step is None else f", step {self.step:,}"
        return f"{self.path}: table '{self.table}', key {self.key}: {what}{save}{step}"


def records(path: str, wanted: Wanted) -> Iterator[Record]:
    """Where keys lie in the checkpoint of a folder, save by save.

    Raises:
        FileNotFoundError, CheckpointError, OSError: there is no checkpoint, or a file is missing or cut off. (CRCs are
            not looked at: `sok verify` does.)
    """
    for number, link in enumerate(read_manifest(path).links):
        for table in link.tables:
            words_here = wanted.words(table.name, table.key_dtype)
            said: set[tuple[int, bool]] = set()  # a row that is cut has its key in several files
            for file in table.files if len(words_here) else ():
                for is_row, words in found_in(os.path.join(path, file.name), words_here):
                    said |= {(key, is_row) for key in keys_of(words, table.key_dtype)}
            for key, is_row in sorted(said):
                yield Record(path, table.name, key, is_row, link.generation, number > 0, table.step)


def check_erasable(path: str) -> None:
    """What `erase_from` would refuse is raised now; nothing is changed.

    Raises:
        as `erase_from`, but for what is found while files are read to their ends.
    """
    read_manifest(path)
    for lease in _leases(path):
        lease.refuse_others()


def erase_from(path: str, wanted: Wanted) -> list[Record]:
    """Puts a full checkpoint without these keys in the place of one that has them; gives what it had of them.

    The new one takes its place at once. Killed before, the old one is whole; killed after, its files may still lie
    there: the next call removes them. At the end the files are read again: no key is in them.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError, tf.errors.DataLossError: it is damaged.
        RuntimeError: another job, which still runs, saves there.
        tf.errors.OpError, OSError: another thing that the system says.

    Not collective. Takes the lease of the folder: another job's next save there is refused until it restores.
    """
    from sok.base.progress import on_stderr
    from sok.checkpoint import compacting, verifying

    path = os.path.abspath(path)
    check_erasable(path)
    lease = Lease(in_folder(path))
    lease.take()
    manifest = chains.sweep(path, lease) or read_manifest(path)
    if wrong := verifying.verify(path):
        raise CheckpointError("\n".join(wrong))
    found = list(records(path, wanted))
    if found:
        dtypes = {table.name: table.key_dtype for table in manifest.tables}
        without = {
            name: np.array(sorted({one.key for one in found if one.table == name}), dtypes[name])
            for name in {one.table for one in found}
        }
        with on_stderr("erasing", manifest.bytes, None, "bytes") as bar:
            compacting.rewrite(path, manifest, generation_after(manifest), lease, bar, without=without)
        manifest = chains.sweep(path, lease) or read_manifest(path)
    _check_gone(path, manifest, wanted)
    return found


def _check_gone(path: str, manifest: Manifest, wanted: Wanted) -> None:
    sync_folder(path)  # or the machine may come up again with the old files
    kept = {link.generation for link in manifest.links}
    for name in os.listdir(path):
        match = SHARD_NAME.fullmatch(name.removesuffix(".tmp"))
        if match is not None and match[1] not in kept:
            raise OSError(f"{os.path.join(path, name)}: could not be removed, and may hold erased rows. Remove it.")
    if left := next(records(path, wanted), None):
        raise RuntimeError(f"{left}: it is still there.")


def _leases(path: str) -> list[Lease]:
    """Of the folder and, beside a TensorFlow checkpoint, of its series."""
    from sok.checkpoint import tf_checkpoints

    return [Lease(in_folder(path)), *(Lease(name) for name in tf_checkpoints.leases_of(path))]
