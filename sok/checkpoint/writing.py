"""One save, from its plan to its manifest: what `save` and its background do step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import sok
from sok.base.progress import on_stderr
from sok.checkpoint import chains
from sok.checkpoint import dense as dense_weights
from sok.checkpoint import manifest as manifests
from sok.checkpoint.lease import Lease, LeaseLost, in_folder, utc_now
from sok.checkpoint.manifest import Manifest, OptimizerState, SavedSlotSet, SavedTable, ShardFile
from sok.optimizers import Optimizer
from sok.table import rules
from sok.table.table import EmbeddingVariable

# Rows per worker: fewer are no measure, and cost little.
_FEW_ROWS = 1000


@dataclasses.dataclass
class Work:
    """What one save of this rank is about."""

    path: str
    rank: int
    size: int
    progress: bool | None
    tables: list[EmbeddingVariable] = dataclasses.field(default_factory=list)
    optimizers: list[Optimizer] = dataclasses.field(default_factory=list)
    calls: Any = None  # how ops are run
    generation: str = ""
    before: Manifest | None = None  # what lies there; rank 0 knows it
    lease: Lease = dataclasses.field(init=False)  # to save there, which rank 0 has taken
    steps: list[int] = dataclasses.field(default_factory=list)  # of the tables
    changes: bool = False  # only what has changed
    snapshot: bool = False  # training goes on meanwhile
    versions: bool = False  # of tables over files the rows stay in these
    beside: bool = False  # a thread writes while training goes on
    on_commit: Callable[[], None] | None = None  # what rank 0 does when the checkpoint is in place
    dense: Mapping[str, tf.Variable] = dataclasses.field(default_factory=dict)  # saved beside, by rank 0
    expected_bytes: int = 0
    _states: tuple[OptimizerState, ...] = ()
    _begun: list[EmbeddingVariable] = dataclasses.field(default_factory=list)
    _mine: list[str] = dataclasses.field(default_factory=list)
    _dense_values: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lease = Lease(in_folder(self.path))

    def of_another(self, rank: int, tables: list[EmbeddingVariable]) -> Work:
        """The same for the shards of another holder: a server, whose part this process does."""
        given = ("optimizers", "calls", "generation", "steps", "changes", "versions")
        made = Work(self.path, rank, self.size, False, tables, **{name: getattr(self, name) for name in given})
        made.lease = self.lease
        return made

    @property
    def _base(self) -> Manifest | None:
        """What this save goes on from; rank 0 knows it."""
        return self.before if self.changes else None

    def begin(self, snapshot: bool) -> None:
        """What the tables hold, and what has changed, is from now on of this save."""
        self.snapshot = snapshot
        for table in self.tables:
            if self._is_version(table):
                self.calls.keep_versions(table)
        for table in self.tables:
            is_version = self._is_version(table)
            self.expected_bytes += self.calls.size(table) // 8 if is_version else self._bytes_of(table)
            of = "version" if is_version else "changes" if self.changes else "all"
            self.calls.begin(table, of if snapshot else "")
            self._begun.append(table)
        self._states = tuple(_state(optimizer, self.calls) for optimizer in self.optimizers)
        # Copies, as training may go on meanwhile.
        self._dense_values = {} if self.rank else {name: tf.identity(one) for name, one in self.dense.items()}

    def write(self) -> list[dict[str, Any] | None]:
        """Writes this rank's shards; what each holds, None for a table whose rows are on another rank."""
        summaries: list[dict[str, Any] | None] = []
        show = False if self.rank else bool(self.progress) if self.snapshot else self.progress
        with on_stderr("saving", self.expected_bytes, show, "bytes") as bar:
            for number, table in enumerate(self.tables):
                if self.rank not in table.placement.writers(self.size):
                    summaries.append(None)
                    continue
                name = f"{self.generation}-t{number:04}-r{self.rank:04}.shard"
                self._mine.append(name)
                try:
                    with bar.watching(os.path.join(self.path, name + ".tmp")):
                        summary = self._save(table, os.path.join(self.path, name))
                except Exception:
                    self.lease.check()  # if another job has removed the file, that is what is wrong
                    raise
                summaries.append({"name": name, **summary})
        return summaries

    def commit(self, written: Sequence[Sequence[dict[str, Any] | None]]) -> None:
        """Makes what all ranks have written the checkpoint. To be called on all; rank 0 does it."""
        if self.rank != 0:
            return
        try:
            made = self._manifest(written)
            if self.dense:
                files = dense_weights.write(self.path, self.generation, self._dense_values)
                made = dataclasses.replace(made, dense=files)
            self.lease.check()
            _check_files(self.path, made)
            manifests.write_manifest(self.path, made, self._check_before_the_rename)
        except BaseException:
            # If the manifest is there, but perhaps not on the disk yet, what the old one lists has to stay, too.
            chains.remove_generation(self.path, self.generation)
            raise
        if self.on_commit is not None:
            self.on_commit()
        with contextlib.suppress(LeaseLost):  # the next save will tell
            chains.sweep(self.path, self.lease)
        self._warn_of_crowded_shards(made)

    def _check_before_the_rename(self) -> None:
        self.lease.check()
        if self._base is not None and (found := chains.current(self.path)) != self._base:
            raise RuntimeError(
                f"{self.path}: {found and found.generation} has taken the place of {self._base.generation} during "
                "the save. Two programs must not save into one folder at the same time."
            )

    def room_for_summaries(self) -> int:
        """As many bytes as JSON needs for what `write` returns, and more."""
        names = sum(len(s.name) for table in self.tables for s in self.calls.slot_sets(table))
        sets = sum(len(self.calls.slot_sets(table)) + 1 for table in self.tables)
        return 4096 + 6 * names + 1024 * sets

    def _warn_of_crowded_shards(self, made: Manifest) -> None:
        """Says once per table that one worker holds twice its share of the rows, or more."""
        for table, saved in zip(self.tables, made.tables, strict=True):
            is_spread = len(saved.files) > 1 and not saved.placement.cuts_rows
            if not is_spread or saved.rows < _FEW_ROWS * len(saved.files) or table.is_known_crowded:
                continue
            fullest = max(saved.files, key=ShardFile.num_held)
            share = saved.rows / len(saved.files)
            if fullest.num_held() >= 2 * share:
                table.is_known_crowded = True
                warnings.warn(
                    f"Table '{saved.name}': rank {fullest.rank} holds {fullest.num_held():,} of its {saved.rows:,} "
                    f"rows, {fullest.num_held() / share:.1f} times its share. "
                    + (
                        ""
                        if saved.placement.hash or not saved.hashed
                        else "Make it with placement=sok.row_wise(hash=True): "
                    )
                    + "steps wait for that rank, and its shard is full first.",
                    stacklevel=2,
                )

    def end(self, complete: bool) -> None:
        """Tells the tables how it went. Of a save that failed no change is forgotten."""
        for table in self._begun:
            self.calls.end(table, self.generation if complete else "")
        self._begun = []

    def remove_files(self) -> None:
        """Removes what this rank has written. Only if it is certain that no manifest lists it, now or later."""
        for name in self._mine:
            chains.remove(self.path, name)
            chains.remove(self.path, name + ".tmp")

    def bytes_written(self) -> int:
        """How much of this rank's shards is in files by now."""
        sizes = (chains.size_of(self.path, name + end) for name in list(self._mine) for end in (".tmp", ""))
        return sum(size or 0 for size in sizes)

    def _is_version(self, table: EmbeddingVariable) -> bool:
        return self.versions and table.options.has_file

    def _save(self, table: EmbeddingVariable, path: str) -> dict[str, Any]:
        if self._is_version(table):
            return self.calls.save_version(table, path, self.generation, self.beside)
        if self.snapshot:
            return self.calls.save_snapshot(table, path, self.generation, self.changes)
        return (self.calls.save_changes if self.changes else self.calls.save)(table, path, self.generation)

    def _bytes_of(self, table: EmbeddingVariable) -> int:
        slots = sum(rules.find(slot_set.rule).slot_floats(table.local_dim) for slot_set in self.calls.slot_sets(table))
        rows = self.calls.changes(table)["rows"] if self.changes else self.calls.size(table)
        return rows * (8 + 4 * (table.local_dim + slots))

    def _manifest(self, written: Sequence[Sequence[dict[str, Any] | None]]) -> Manifest:
        return Manifest(
            generation=self.generation,
            sok_version=sok.__version__,
            world_size=self.size,
            created=utc_now(),
            tables=tuple(
                _table(table, [of_rank[i] for of_rank in written], self.steps[i]) for i, table in enumerate(self.tables)
            ),
            optimizers=self._states,
            before=() if self._base is None else self._base.links,
        )


def _table(table: EmbeddingVariable, summaries: Sequence[dict[str, Any] | None], step: int) -> SavedTable:
    files: list[ShardFile] = []
    sets: dict[str, SavedSlotSet] = {}
    for rank, summary in enumerate(summaries):
        if summary is None:
            continue
        counts = (summary["erased"], summary["held"]) if summary["delta"] else ()
        files.append(ShardFile(summary["name"], rank, summary["rows"], summary["bytes"], summary["digest"], *counts))
        for slot_set in summary["slot_sets"]:
            # A rank that an optimizer has not reached yet has no such set; calls of an exact Adam are equal on all.
            sets.setdefault(slot_set["name"], SavedSlotSet(**slot_set))
    attributes = table._attributes
    return SavedTable(
        name=table.table_name,
        dim=table.dim,
        key_dtype=table.key_dtype.name,
        hashed=table.hashed,
        placement=table.placement,
        capacity=table.capacity,
        num_keys=attributes["num_keys"] or None,
        seed=table.seed,
        initializer={"kind": attributes["initializer"], "a": attributes["init_a"], "b": attributes["init_b"]},
        slot_sets=tuple(sets.values()),
        files=tuple(files),
        step=step,
    )


def _state(optimizer: Optimizer, calls: Any) -> OptimizerState:
    iterations, *rate = optimizer.variables
    return OptimizerState(
        slot_set=optimizer.slot_set,
        rule=optimizer.rule,
        iterations=int(calls.read(iterations)),
        learning_rate=float(calls.read(rate[0])) if rate else None,
        source=optimizer.source,
    )


def _check_files(path: str, manifest: Manifest) -> None:
    for file in manifest.files:
        size = chains.size_of(path, file.name)
        if size != file.bytes:
            raise RuntimeError(
                f"{os.path.join(path, file.name)}: rank {file.rank} wrote {file.bytes} bytes, and rank 0 sees "
                f"{'no such file' if size is None else f'{size} bytes'}. All workers must save into one folder, on "
                "storage that they share."
            )
