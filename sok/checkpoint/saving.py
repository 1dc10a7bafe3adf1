"""`save`: all ranks write what they hold, and rank 0 makes it a checkpoint."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok.base import log
from sok.base.types import PathLike, Session
from sok.checkpoint import background, chains
from sok.checkpoint import manifest as manifests
from sok.checkpoint.arguments import Optimizers, Tables, calls_for, optimizers_of, tables_of
from sok.checkpoint.dense import named
from sok.checkpoint.lease import Lease, in_folder
from sok.checkpoint.manifest import Manifest
from sok.checkpoint.native import SessionCalls
from sok.checkpoint.writing import Work
from sok.job import context
from sok.job.agreement import check_equal, together
from sok.optimizers import Optimizer
from sok.table import on_servers, reading, rules
from sok.table.counted import with_counted
from sok.table.table import EmbeddingVariable


def save(
    path: PathLike,
    variables_or_model: Tables,
    optimizers: Optimizers | None = None,
    *,
    incremental: bool = False,
    asynchronous: bool = False,
    versions: bool = False,
    max_chain: int = 100,
    dense: bool | Mapping[str, tf.Variable] = False,
    session: Session | None = None,
    progress: bool | None = None,
    _on_commit: Callable[[], None] | None = None,
) -> background.AsyncSave | None:
    """Writes tables, with all optimizer slots, into the folder `path`: every worker its own rows.

    The folder is made if it is missing. If it holds a checkpoint, the new one takes its place at once when it is
    complete, and not before: a crash or a full disk leaves the old one whole. Lookups go on meanwhile; updates of a
    table wait while it is written.

    Args:
        path: a folder on storage that all workers see; the same on all of them.
        variables_or_model: an `EmbeddingVariable`, a layer, a model (Keras 3, tf_keras, tf.Module), or a list of these.
            Of a model the tables are saved; save its dense weights as usual.
        optimizers: of the tables: one or a list of `sok.optimizers`, `sok.DistributedOptimizer` or
            `sok.OptimizerWrapper`. Their slots are in the tables and are saved in any case; given here, their step
            counts and learning rates (where these are variables) are, too. None: those that have trained the tables,
            and that of a compiled model.
        incremental: writes only the rows that were touched since the checkpoint that lies in `path`, and the keys that
            were erased. `sok.restore` reads that one first, and then all such deltas; `sok.compact` makes one
            checkpoint of them. If what lies there is not what these tables were last saved or restored as (another
            program has saved there, or these tables elsewhere), all rows are written, with a warning.
        asynchronous: returns at once, and writes in the background what the tables hold now, while training goes on.
        versions: of tables over files (`storage=sok.Storage(...)`) the rows stay in these files, and the checkpoint
            says where: a save writes no more of them than memory alone holds. Files and checkpoint belong together:
            docs/storage.md, "Versions". Other tables are written as ever.
        max_chain: for incremental saves: the most saves that a chain may have, at least 1. A save that would make it
            longer writes all rows and begins a new chain: a restore reads every link, and the manifest lists them.
        dense: True saves the dense weights of the model, too, for whoever follows (`sok.follow(..., dense=True)`); or
            variables by names of one's own. Those of rank 0, of the same step as the rows. `sok.restore` gives them to
            nobody: a program that trains on restores by `sok.CheckpointManager`.
        session: for tables of a v1 graph: the session; None: the default one.
        progress: whether rank 0 shows a bar on stderr. None: if that is a terminal (not if `asynchronous`).

    Returns:
        None, or with `asynchronous` the `AsyncSave`, whose `result()` waits until the checkpoint is in place. An error
        is raised there, and at the next `sok.save`. That one waits for this one, as does `sok.restore`.

    Raises:
        TypeError, ValueError: the arguments make no sense, or differ between workers.
        RuntimeError: another job has begun to save into `path` since this one did. That job may go on there, this one
            may not: docs/checkpoints.md, "Where".
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

        What one step has touched is little beside the table:

        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save(folder, [table])
        ...     table.assign([7], [[5.0, 6.0]])
        ...     sok.save(folder, [table], incremental=True)
        ...     [link.tables[0].files[0].rows for link in sok.checkpoint.read_manifest(folder).links]
        [2, 1]
    """
    job = context.get_job()
    transport = job.transport
    path = os.path.abspath(os.fspath(path))
    background.finish(job)

    def plan() -> dict[str, Any]:
        tables = list(with_counted(tables_of(variables_or_model)).values())
        reading.tell_untrained(tables)
        work.optimizers = optimizers_of(optimizers, variables_or_model) or []
        work.calls = calls_for(tables, session)
        shards.extend(on_servers.held(tables))
        work.tables = shards[0]
        if job.servers is not None and asynchronous:
            raise ValueError(
                "`asynchronous` is not there for tables on parameter servers: workers go on there anyway. Save "
                "between two steps, with all workers at rest, for one instant of all rows."
            )
        _warn_of_lost_counts(work.tables, work.optimizers, work.calls)
        names = [[table.table_name for table in work.tables], [o.slot_set for o in work.optimizers]]
        if isinstance(max_chain, bool) or not isinstance(max_chain, int) or max_chain < 1:
            raise ValueError(f"`max_chain` must be a whole number of at least 1. Received: {max_chain!r}.")
        if dense is not False and isinstance(work.calls, SessionCalls):
            raise ValueError("`dense` is for programs without v1 sessions.")
        work.dense = named(dense, variables_or_model) if dense is not False else {}
        if versions and incremental:
            raise ValueError("`versions` and `incremental` exclude each other: a version writes changes alone anyway.")
        how = [bool(incremental), bool(asynchronous), bool(versions), max_chain]
        said: dict[str, Any] = {"arguments": [path, *names, *how, sorted(work.dense)]}
        said["steps"] = [max(work.calls.step(one) for one in of_table) for of_table in zip(*shards, strict=True)]
        if transport.rank == 0:
            said["generation"], work.before = _begin(path, work.lease)
            said["lease"] = work.lease.token
        if incremental:
            said["found"] = chains.described(path, work.before)
            said["changes"] = [[work.calls.changes(table) for table in held] for held in shards]
        return said

    # What is held: by this worker, or by each server, whose part of the work this worker has done.
    shards: list[list[EmbeddingVariable]] = []
    work = Work(path, transport.rank, job.holders, progress, versions=bool(versions), on_commit=_on_commit)
    work.beside = bool(asynchronous)
    said = together(transport, "sok/save/plan", plan)
    check_equal(
        [answer["arguments"] for answer in said],
        "sok.save: [path, tables, optimizers, incremental, asynchronous, versions, max_chain, dense]",
    )
    work.steps = _agreed_steps(work, [answer["steps"] for answer in said])
    work.generation = said[0]["generation"]
    work.lease = Lease(in_folder(path), said[0]["lease"])
    why: str | None = ""
    if incremental:
        changes = [of_holder for answer in said for of_holder in answer["changes"]]
        why = chains.why_all_rows(said[0]["found"], work.tables, changes, max_chain)
    work.changes = why is None
    works = [work, *(work.of_another(rank, held) for rank, held in enumerate(shards) if rank)]

    def begin(snapshot: bool) -> None:
        if why and transport.rank == 0:
            warnings.warn(f"sok.save: all rows are written into {path}, not changes alone: {why}.", stacklevel=6)
        for of_holder in works:
            of_holder.begin(snapshot)

    def begin_beside() -> None:
        begin(snapshot=True)
        background.reserve(work)

    def write() -> Any:
        begin(snapshot=work.versions)
        return [of_holder.write() for of_holder in works]

    def remove_files() -> None:
        for of_holder in works:
            of_holder.remove_files()

    def end(complete: bool) -> None:
        with contextlib.ExitStack() as all_of_them:  # those, too, behind a server that is lost
            for of_holder in reversed(works):
                all_of_them.callback(of_holder.end, complete)

    try:
        if asynchronous:
            together(transport, "sok/save/begin", begin_beside, undo=lambda: background.discard(work))
            return background.start(job, work)
        # If a peer is lost on the way, the files stay: rank 0 may have had all answers, and be listing them right now.
        written = together(transport, "sok/save/write", write, undo=remove_files)
        together(transport, "sok/save/commit", lambda: work.commit([one for of_rank in written for one in of_rank]))
    except BaseException:
        end(complete=False)
        raise
    end(complete=True)
    log.logger.info("Saved %d tables to %s as %s.", len(work.tables), path, work.generation)
    return None


def _agreed_steps(work: Work, said: list[list[int]]) -> list[int]:
    """The step of each table; where workers disagree the largest, with a warning."""
    for table, by_rank in zip(work.tables, zip(*said, strict=True), strict=True):
        if work.rank == 0 and len(set(by_rank)) > 1:
            warnings.warn(
                f"sok.save: workers disagree about the step of table '{table.table_name}': by rank {list(by_rank)}. "
                "All must call apply_gradients with it equally often, with a gradient or None. "
                f"Saved is {max(by_rank)}.",
                stacklevel=4,
            )
    return [max(by_rank) for by_rank in zip(*said, strict=True)]


def _warn_of_lost_counts(tables: Sequence[EmbeddingVariable], chosen: Sequence[Optimizer], calls: Any) -> None:
    given = {optimizer.slot_set for optimizer in chosen}
    kept = {s.name: s.rule for table in tables for s in calls.slot_sets(table) if s.name not in given}
    lost = [name for name, rule in kept.items() if rules.find(rule).counts_steps]
    if lost:
        warnings.warn(
            f"sok.save: the step count of {', '.join(sorted(lost))} is not saved, as the optimizer was not given: "
            "restored, it would correct its bias as if it had just begun. Pass optimizers=[...].",
            stacklevel=5,
        )


def _begin(path: str, lease: Lease) -> tuple[str, Manifest | None]:
    """Makes the folder and takes its lease; gives the new generation its name, and what lies there."""
    manifests.make_folder(path)
    lease.take()
    try:
        # What interrupted saves have left would take the room that this one needs.
        current = chains.sweep(path, lease)
    except manifests.CheckpointError as error:
        raise manifests.CheckpointError(
            f"{error} sok.save replaces checkpoints, but not what it cannot read: remove it, or use another folder."
        ) from None
    return manifests.generation_after(current), current
