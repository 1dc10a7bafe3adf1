"""`save`: all ranks write what they hold, and rank 0 makes it a checkpoint."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sok
from sok import context
from sok.checkpoint import manifest as manifests
from sok.checkpoint.agreement import check_equal, together
from sok.checkpoint.bars import FileBar
from sok.checkpoint.manifest import Manifest, OptimizerState, Shard, SlotSet, Table
from sok.checkpoint.targets import calls_for, optimizers_of, tables_of
from sok.optimizers import Optimizer
from sok.table import EmbeddingVariable


def save(
    path: str | os.PathLike,
    variables_or_model: Any,
    optimizers: Any = None,
    *,
    session: Any = None,
    progress: bool | None = None,
) -> None:
    """Writes tables, with all optimizer slots, into the folder `path`: every worker its own rows.

    The folder is made if it is missing. If it holds a checkpoint, the new one takes its place at once when it is
    complete, and not before: whatever happens in between, a crash or a full disk, the old one stays whole. Lookups go
    on meanwhile; updates of a table wait while it is written.

    Args:
        path: a folder on storage that all workers see; the same on all of them.
        variables_or_model: an `EmbeddingVariable`, a layer, a model (Keras 3, tf_keras, tf.Module), or a list of these.
            Of a model the tables are saved; save its dense weights as usual.
        optimizers: of the tables: one or a list of `sok.optimizers`, `sok.DistributedOptimizer` or
            `sok.OptimizerWrapper`. Their slots are in the tables and are saved in any case; given here, their step
            counts and learning rates (where these are variables) are, too. None: that of a compiled model, if it has
            one.
        session: for tables of a v1 graph: the session; None: the default one.
        progress: whether rank 0 shows a bar on stderr. None: if that is a terminal.

    Raises:
        TypeError, ValueError: the arguments make no sense, or differ between workers.
        tf.errors.ResourceExhaustedError: the disk is full. The old checkpoint stays.
        tf.errors.OpError, OSError: another thing that the system says, with the file's name.

    Collective: call it on all workers between steps. An error of one worker is raised on all.

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="kept")
        >>> table.assign([3, 5], [[1.0, 2.0], [3.0, 4.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save(folder, [table])
        ...     _ = table.erase([3])
        ...     sok.restore(folder, [table])
        >>> table.sparse_read([3]).numpy().tolist()
        [[1.0, 2.0]]
    """
    transport = context.get_transport()
    path = os.path.abspath(os.fspath(path))

    def plan() -> dict[str, Any]:
        nonlocal tables, chosen, calls
        tables = tables_of(variables_or_model)
        chosen = optimizers_of(optimizers, variables_or_model) or []
        calls = calls_for(list(tables.values()), session)
        _warn_of_lost_counts(list(tables.values()), chosen, calls)
        generation = _begin(path) if transport.rank == 0 else None
        return {"arguments": [path, list(tables), [o.slot_set for o in chosen]], "generation": generation}

    tables: dict[str, EmbeddingVariable] = {}
    chosen: list[Optimizer] = []
    calls: Any = None
    said = together(transport, "sok/save/plan", plan)
    check_equal([answer["arguments"] for answer in said], "sok.save: [path, tables, optimizers]")
    generation = said[0]["generation"]

    mine: list[str] = []
    # If a peer is lost on the way, the files stay: rank 0 may have had all answers, and be listing them right now.
    written = together(
        transport,
        "sok/save/write",
        lambda: _write(path, generation, list(tables.values()), calls, transport.rank, mine, progress),
        undo=lambda: [_remove(path, name) for name in mine],
    )

    def commit() -> None:
        if transport.rank != 0:
            return
        try:
            made = _manifest(generation, transport.size, list(tables.values()), written, chosen, calls)
            _check_files(path, made)
            manifests.write_manifest(path, made)
        except BaseException:
            current = _current(path)
            if current != generation:
                _remove_unlisted(path, current)
            # Else the new manifest is there, but perhaps not on the disk yet: what the old one lists has to stay.
            raise
        _remove_unlisted(path, generation)

    together(transport, "sok/save/commit", commit)


def _warn_of_lost_counts(tables: Sequence[EmbeddingVariable], chosen: Sequence[Optimizer], calls: Any) -> None:
    given = {optimizer.slot_set for optimizer in chosen}
    lost = {s.name for table in tables for s in calls.slot_sets(table) if "adam" in s.rule and s.name not in given}
    if lost:
        warnings.warn(
            f"sok.save: the step count of {', '.join(sorted(lost))} is not saved, as the optimizer was not given: "
            "restored, it would correct its bias as if it had just begun. Pass optimizers=[...].",
            stacklevel=5,
        )


def _begin(path: str) -> str:
    """Makes the folder and gives the new generation its name."""
    os.makedirs(path, exist_ok=True)
    try:
        current = _current(path)
    except manifests.CheckpointError as error:
        raise manifests.CheckpointError(
            f"{error} sok.save replaces checkpoints, but not what it cannot read: remove it, or use another folder."
        ) from None
    _remove_unlisted(path, current)  # what interrupted saves have left would take the room that this one needs
    number = 1 if current is None else int(current[1:].partition("-")[0]) + 1
    return f"g{number:06}-{secrets.token_hex(4)}"


def _write(
    path: str,
    generation: str,
    tables: Sequence[EmbeddingVariable],
    calls: Any,
    rank: int,
    mine: list[str],
    progress: bool | None,
) -> list[dict[str, Any] | None]:
    """Writes this rank's shards; what each holds, None for a table whose rows are on another rank."""
    sizes = [_bytes_of(table, calls) for table in tables]
    summaries: list[dict[str, Any] | None] = []
    with FileBar("saving", sum(sizes), rank, progress) as bar:
        for number, table in enumerate(tables):
            if table.owner not in (None, rank):
                summaries.append(None)
                continue
            name = f"{generation}-t{number:04}-r{rank:04}.shard"
            mine.append(name)
            with bar.watching(os.path.join(path, name + ".tmp")):
                summary = calls.save(table, os.path.join(path, name), generation)
            summaries.append({"name": name, **summary})
    return summaries


def _bytes_of(table: EmbeddingVariable, calls: Any) -> int:
    vectors = 1 + sum(slot_set.num_slots for slot_set in calls.slot_sets(table))
    return calls.size(table) * (8 + 4 * table.dim * vectors)


def _manifest(
    generation: str,
    world_size: int,
    tables: Sequence[EmbeddingVariable],
    written: Sequence[Sequence[dict[str, Any] | None]],
    chosen: Sequence[Optimizer],
    calls: Any,
) -> Manifest:
    return Manifest(
        generation=generation,
        sok_version=sok.__version__,
        world_size=world_size,
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tables=tuple(_table(table, [of_rank[i] for of_rank in written]) for i, table in enumerate(tables)),
        optimizers=tuple(_state(optimizer, calls) for optimizer in chosen),
    )


def _table(table: EmbeddingVariable, summaries: Sequence[dict[str, Any] | None]) -> Table:
    files, sets = [], {}
    for rank, summary in enumerate(summaries):
        if summary is None:
            continue
        files.append(Shard(summary["name"], rank, summary["rows"], summary["bytes"], summary["digest"]))
        for slot_set in summary["slot_sets"]:
            # A rank that an optimizer has not reached yet has no such set; calls of an exact Adam are equal on all.
            sets.setdefault(slot_set["name"], SlotSet(**slot_set))
    attributes = table._attributes
    return Table(
        name=table.table_name,
        dim=table.dim,
        key_dtype=table.key_dtype.name,
        hashed=table.hashed,
        owner=table.owner,
        capacity=table.capacity,
        num_keys=attributes["num_keys"] or None,
        seed=table.seed,
        initializer={"kind": attributes["initializer"], "a": attributes["init_a"], "b": attributes["init_b"]},
        slot_sets=tuple(sets.values()),
        files=tuple(files),
    )


def _state(optimizer: Optimizer, calls: Any) -> OptimizerState:
    iterations, *rate = optimizer.variables
    return OptimizerState(
        slot_set=optimizer.slot_set,
        rule=optimizer.rule,
        iterations=int(calls.read(iterations)),
        learning_rate=float(calls.read(rate[0])) if rate else None,
    )


def _check_files(path: str, manifest: Manifest) -> None:
    for table in manifest.tables:
        for file in table.files:
            found = Path(path, file.name)
            size = found.stat().st_size if found.exists() else None
            if size != file.bytes:
                raise RuntimeError(
                    f"{found}: rank {file.rank} wrote {file.bytes} bytes, and rank 0 sees "
                    f"{'no such file' if size is None else f'{size} bytes'}. All workers must save into one folder, on "
                    "storage that they share."
                )


def _current(path: str) -> str | None:
    """The generation of the checkpoint that is there; None without one."""
    try:
        return manifests.read_manifest(path).generation
    except FileNotFoundError:
        return None


def _remove(path: str, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, name))


def _remove_unlisted(path: str, generation: str | None) -> None:
    """Removes shards of other generations: of the checkpoint before, and what interrupted saves have left."""
    for name in os.listdir(path):
        match = manifests.SHARD_NAME.fullmatch(name.removesuffix(".tmp"))
        if match is not None and match[1] != generation:
            _remove(path, name)
