"""`restore`: every rank reads what can hold its keys, and when all have it, all take it over."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sok.base import log
from sok.base.errors import CheckpointError
from sok.base.progress import on_stderr
from sok.base.types import PathLike, Session
from sok.checkpoint import background, chains
from sok.checkpoint.arguments import Optimizers, Tables, calls_for, optimizers_of, tables_by_saved_name
from sok.checkpoint.lease import forget, in_folder
from sok.checkpoint.manifest import Link, Manifest, OptimizerState, SavedTable, ShardFile, read_manifest
from sok.checkpoint.summary import check_summary
from sok.job import context
from sok.job.agreement import check_equal, together
from sok.job.transport.base import Transport
from sok.optimizers import Optimizer
from sok.table import on_servers, rules
from sok.table.counted import Counted, with_counted
from sok.table.policies import HISTORY_RULE
from sok.table.table import EmbeddingVariable

# A job that saves without pause may remove what is being read: so often the checkpoint that took its place is read.
TRIES = 10


def restore(
    path: PathLike,
    variables_or_model: Tables,
    optimizers: Optimizers | None = None,
    *,
    slots: bool = True,
    session: Session | None = None,
    progress: bool | None = None,
    _names: Callable[[EmbeddingVariable, SavedTable], dict[str, str]] | None = None,
    _give_generation: bool = False,
    _as_new: bool = False,
) -> str | None:
    """Gives tables the rows and slots of the checkpoint in `path`, at any number of workers.

    Afterwards the tables hold what they held when it was saved, and nothing else. Files, keys and room are checked
    before: if anything is wrong, an error is raised on all workers and no table has changed on any. (For that, old and
    new rows are in memory at the same time.) Gradients of lookups from before are ignored. An incremental checkpoint is
    read link by link: the full save, then what each later one has changed; the next incremental save into `path` goes
    on from it.

    Args:
        path: the folder, which all workers see.
        variables_or_model: as for `sok.save`. Tables are found by name; other tables of the checkpoint are ignored. Or
            a mapping from names in the checkpoint to embedding variables.
            Capacity, hashing and owner may be others than when it was saved; dim and key dtype may not.
        optimizers: as for `sok.save`, to take over step counts and learning rates. Each is found by the name of its
            slots (`slot_set`) or, if no name is known and there are as many as were saved, by its place. None: those
            that train the tables or that the model was compiled with, as far as they were saved; if there are none,
            slots are restored under the names that they were saved under.
        slots: False leaves optimizer state out: tables then have the rows, and optimizers begin anew.
        session: for tables of a v1 graph: the session; None: the default one.
        progress: whether rank 0 shows a bar on stderr. None: if that is a terminal.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the manifest is damaged or newer than this sok, or does not belong to its files (a ValueError).
        tf.errors.DataLossError: a file is damaged; with its name and the offset.
        ValueError: a table or optimizer is not in the checkpoint, or dim, key dtype or rule are others.
        tf.errors.ResourceExhaustedError: a worker's shard has no room for its rows.
        tf.errors.InvalidArgumentError: a key that a table without hashing cannot hold.
        tf.errors.OpError, OSError: another thing that the system says.

    If another job saves into `path` meanwhile, so that files of the checkpoint go, the new one is read instead.

    Collective. Warns if a table's seed or initializer are others: rows that were never seen then start from other
    values than in the job that was saved.

    Example: see `sok.save`.
    """
    job = context.get_job()
    path = os.path.abspath(os.fspath(path))
    background.finish(job, raising=False)
    for left in reversed(range(TRIES)):
        generation = _restore_once(
            job.transport, path, variables_or_model, optimizers, slots, session, progress, _names, left == 0, _as_new
        )
        if generation is not None:
            break
    log.logger.info("Restored %s of %s.", generation, path)
    forget(in_folder(path))  # what another job has saved there is known now
    return generation if _give_generation else None


def is_superseded(path: str, generation: str) -> bool:
    """Whether another checkpoint lies there by now, so that files of this one may be gone."""
    try:
        found = chains.current(path)
    except (OSError, ValueError):
        return False
    return found is not None and found.generation != generation


def _restore_once(
    transport: Transport,
    path: str,
    variables_or_model: Any,
    optimizers: Any,
    slots: bool,
    session: Any,
    progress: bool | None,
    names: Callable[[EmbeddingVariable, SavedTable], dict[str, str]] | None,
    is_last: bool,
    as_new: bool,
) -> str | None:
    """As `restore`; None if another checkpoint took the place of the one that was being read.

    Args:
        as_new: tables take rows, and slots where `slots` says so, and begin at step 0, without histories and counts.
    """
    tables: dict[str, EmbeddingVariable] = {}
    calls: Any = None
    manifest: Any = None
    states: list[tuple[Optimizer, OptimizerState]] = []
    empty: set[str] = set()  # of the tables, which begin without a row

    def plan() -> list[Any]:
        nonlocal tables, calls, manifest, states, empty
        tables = with_counted(tables_by_saved_name(variables_or_model))
        chosen = optimizers_of(optimizers, variables_or_model)
        calls = calls_for(list(tables.values()), session)
        manifest = read_manifest(path)
        empty = {
            name
            for name, variable in tables.items()
            if waits_for_nothing(manifest, name, variable) or as_new and isinstance(variable, Counted)
        }
        saved = [name for name in tables if name not in empty]
        for name in saved:
            _check_table(path, manifest, name, tables[name])
        if slots:
            _check_rules(path, manifest, saved)
            states = _matched(path, manifest, chosen, explicit=optimizers is not None)
        return [path, manifest.generation, list(tables), [o.slot_set for o, _ in states]]

    said = together(transport, "sok/restore/plan", plan)
    if not is_last and len({generation for _, generation, *_ in said}) > 1:
        check_equal([[path, *rest] for path, _, *rest in said], "sok.restore: [path, tables, optimizers]")
        return None  # a save came between two ranks' reading
    check_equal(said, "sok.restore: [path, checkpoint, tables, optimizers]")

    held = [dict(zip(tables, shards, strict=True)) for shards in on_servers.held(list(tables.values()))]
    seconds: list[dict[str, Any]] = [{} for _ in held]
    whole: list[EmbeddingVariable] = []

    def load() -> bool:
        try:
            for shards, second in zip(held, seconds, strict=True):
                _load(path, manifest, shards, states, slots, calls, second, progress, names, whole, empty, as_new)
        except Exception:
            if is_last or not is_superseded(path, manifest.generation):
                raise
            return False
        return True

    loaded = [False]
    try:
        loaded = together(transport, "sok/restore/load", load)
    finally:
        if not all(loaded):
            for shards, made in zip(held, seconds, strict=True):
                for name, second in made.items():
                    calls.drop(shards[name], second)
    if not all(loaded):
        return None
    for shards, made in zip(held, seconds, strict=True):
        for name, second in made.items():
            calls.swap(shards[name], second)
            calls.set_step(shards[name], 0 if as_new or name in empty else manifest.step_of(name))
    for table in whole:  # the next incremental save goes on from here
        calls.begin(table)
        calls.end(table, manifest.generation)
    for optimizer, state in states:
        iterations, *rate = optimizer.variables
        calls.assign(iterations, state.iterations)
        if rate and state.learning_rate is not None:
            calls.assign(rate[0], state.learning_rate)
    return manifest.generation


def waits_for_nothing(manifest: Manifest | Link, name: str, variable: EmbeddingVariable) -> bool:
    """Whether these are keys that wait for rows, and none did, or nobody counted them, when it was saved."""
    return isinstance(variable, Counted) and name not in manifest.names


def is_wanted(rule: str, variable: EmbeddingVariable, slots: bool) -> bool:
    """Whether a table takes over slots of this rule. What rows have seen is no optimizer's."""
    return variable.options.keeps_history if rule == HISTORY_RULE else slots


def _check_table(path: str, manifest: Manifest, name: str, variable: EmbeddingVariable) -> None:
    if name not in manifest.names:
        known = ", ".join(f"'{there}'" for there in manifest.names)
        raise ValueError(
            f"{path} holds no table '{name}'. It holds: {known}. If the table has another name there, pass a mapping "
            "{'name there': variable}."
        )
    saved = manifest.table(name)
    for what, here, there in (
        ("dim", variable.dim, saved.dim),
        ("key dtype", variable.key_dtype.name, saved.key_dtype),
    ):
        if here != there:
            raise ValueError(f"Table '{variable.table_name}' has {what} {here}; '{name}' in {path} has {there}.")
    attributes = variable._attributes
    own = (variable.seed, attributes["initializer"], attributes["init_a"], attributes["init_b"])
    theirs = (saved.seed, *(saved.initializer.get(key) for key in ("kind", "a", "b")))
    no_seed = "constant" in (own[1], theirs[1])
    if own[no_seed:] != theirs[no_seed:]:
        warnings.warn(
            f"Table '{variable.table_name}' has another seed or initializer than '{name}' in {path}: rows that were "
            f"never seen start from other values. Here {own}, there {theirs} (seed, kind, parameters).",
            stacklevel=5,
        )


def _matched(
    path: str, manifest: Manifest, chosen: list[Optimizer] | None, explicit: bool
) -> list[tuple[Optimizer, OptimizerState]]:
    """Each optimizer with what was saved of it."""
    if not chosen:
        return []
    saved = {state.slot_set: state for state in manifest.optimizers}
    if not explicit and not saved:
        return []  # a checkpoint that was made without
    if not explicit and any(optimizer.slot_set in saved for optimizer in chosen):
        chosen = [optimizer for optimizer in chosen if optimizer.slot_set in saved]
    elif not explicit and len(chosen) != len(saved):
        return []
    if any(optimizer.slot_set in saved for optimizer in chosen) or len(chosen) != len(saved):
        missing = [optimizer.slot_set for optimizer in chosen if optimizer.slot_set not in saved]
        if missing:
            raise ValueError(
                f"{path} holds no step count of the optimizer '{missing[0]}'. It holds: "
                f"{', '.join(map(repr, saved)) or 'none; give optimizers to sok.save, too'}. Without optimizers=, "
                "slots are restored alone."
            )
        pairs = [(optimizer, saved[optimizer.slot_set]) for optimizer in chosen]
    else:
        pairs = list(zip(chosen, manifest.optimizers, strict=True))
    for optimizer, state in pairs:
        if optimizer.rule != state.rule:
            raise ValueError(
                f"Optimizer '{optimizer.slot_set}' has rule '{optimizer.rule}'; '{state.slot_set}' in {path} has "
                f"'{state.rule}'. To take over the rows alone, pass slots=False."
            )
        if None not in (optimizer.source, state.source) and optimizer.source != state.source:
            warnings.warn(
                f"Rule '{optimizer.rule}' is not what wrote {path}: here it is {optimizer.source}, there "
                f"{state.source} (where it is declared, and a hash of its source). Its slots are taken over. A rule "
                "that cannot go on with them should have another `version`.",
                stacklevel=5,
            )
    return pairs


def _check_rules(path: str, manifest: Manifest, names: Sequence[str]) -> None:
    """Refuses slots that no rule of this process could go on with."""
    needed = {slot_set.name for name in names for slot_set in manifest.table(name).slot_sets}
    for state in manifest.optimizers:
        if state.source is not None and state.slot_set in needed and not rules.is_known(state.rule):
            module, _, _ = state.source.partition(" ")
            raise ValueError(
                f"{path} holds slots of '{state.rule}', a rule of one's own that this process does not know. Import "
                f"the module that declares it first ({module} did, when they were saved). To take over rows alone, "
                "pass slots=False."
            )


def _load(
    path: str,
    manifest: Manifest,
    tables: dict[str, EmbeddingVariable],
    states: Sequence[tuple[Optimizer, OptimizerState]],
    slots: bool,
    calls: Any,
    seconds: dict[str, Any],
    progress: bool | None,
    names: Callable[[EmbeddingVariable, SavedTable], dict[str, str]] | None,
    whole: list[EmbeddingVariable],
    empty: set[str],
    as_new: bool,
) -> None:
    """Reads what this rank needs into second tables; notes which tables will then hold just what was saved."""
    renamed = {state.slot_set: optimizer.slot_set for optimizer, state in states}
    plans: list[tuple[EmbeddingVariable, list[tuple[str, str]], list[tuple[Link, SavedTable, ShardFile]]]] = []
    for name, variable in tables.items():
        if name in empty:
            plans.append((variable, [], []))
            continue
        saved = manifest.table(name)
        if names is not None:
            renamed = names(variable, saved)
        sets = [
            (s.name, renamed.get(s.name, s.name))
            for s in saved.slot_sets
            if is_wanted(s.rule, variable, slots) and not (as_new and s.rule == HISTORY_RULE)
        ]
        _check_sets(path, saved, sets, variable, calls)
        if not as_new and name == variable.table_name and sets == [(s.name, s.name) for s in saved.slot_sets]:
            whole.append(variable)
        files = [
            (link, link.table(name), file)
            for link in manifest.links
            for file in link.table(name).files
            if can_hold(file, link.table(name), link, variable)
        ]
        plans.append((variable, sets, files))
    rank = next(iter(tables.values())).rank
    total = sum(file.bytes for *_, files in plans for _, _, file in files)
    with on_stderr("restoring", total, False if rank else progress, "bytes") as bar:
        for (name, variable), (_, sets, files) in zip(tables.items(), plans, strict=True):
            second = seconds[name] = calls.second(variable, _expected_rows(path, files, variable))
            stored: dict[str, Counter[int]] = {}
            for link, saved, file in files:
                columns = columns_for(file, saved, variable)
                summary = calls.load(variable, second, os.path.join(path, file.name), sets, columns)
                check_summary(os.path.join(path, file.name), link, saved, file, summary)
                for column in range(columns[2], columns[2] + columns[3]) if columns else ():
                    stored.setdefault(link.generation, Counter())[column] += summary["stored"]
                bar.add(file.bytes)
            _check_columns(path, saved, stored)


def _check_columns(path: str, saved: SavedTable, stored: dict[str, Counter[int]]) -> None:
    for generation, rows in stored.items():
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{count:,} have column {column}" for column, count in sorted(rows.items()))
            raise CheckpointError(
                f"{path}: the files of {generation} do not fit together: of the rows of table '{saved.name}' {counts}."
            )


def _check_sets(
    path: str, saved: SavedTable, sets: Sequence[tuple[str, str]], variable: EmbeddingVariable, calls: Any
) -> None:
    own = [name for _, name in sets]
    for name in own:
        if own.count(name) > 1:
            raise ValueError(
                f"Two slot sets of table '{saved.name}' in {path} would both be '{name}' here. Give all of its "
                "optimizers as `optimizers`."
            )
    here = {slot_set.name: slot_set.rule for slot_set in calls.slot_sets(variable)}
    rules = {slot_set.name: slot_set.rule for slot_set in saved.slot_sets}
    for saved_name, name in sets:
        if here.get(name, rules[saved_name]) != rules[saved_name]:
            raise ValueError(
                f"Slot set '{name}' of table '{variable.table_name}' has rule '{here[name]}'; '{saved_name}' in {path} "
                f"has '{rules[saved_name]}'. To take over the rows alone, pass slots=False."
            )


def can_hold(file: ShardFile, saved: SavedTable, link: Link, variable: EmbeddingVariable) -> bool:
    """Whether a file can hold keys of this rank, and columns."""
    of_file, here = saved.columns_of(file), _columns(variable)
    has_columns = max(of_file.start, here.start) < min(of_file.stop, here.stop)
    return has_columns and variable.placement.may_hold(
        variable.rank, variable.world_size, saved.placement, file.rank, link.world_size
    )


def _columns(variable: EmbeddingVariable) -> range:
    return variable.placement.part_of(variable.rank, variable.dim, variable.world_size).columns


def columns_for(file: ShardFile, saved: SavedTable, variable: EmbeddingVariable) -> list[int]:
    """Which columns of a file go where: dim of the file, the first of them there and here, how many; []: all."""
    of_file, here = saved.columns_of(file), _columns(variable)
    if of_file == here:
        return []
    first = max(of_file.start, here.start)
    return [len(of_file), first - of_file.start, first - here.start, min(of_file.stop, here.stop) - first]


def _expected_rows(path: str, files: Sequence[tuple[Link, SavedTable, ShardFile]], variable: EmbeddingVariable) -> int:
    """About how many rows this rank will have; no more than the files and the table have room for."""
    first = _columns(variable).start  # rows are counted where they begin
    files = [(link, saved, file) for link, saved, file in files if first in saved.columns_of(file)]
    room = sum(
        # Of a file that is gone none: reading it will say what is wrong.
        min(file.rows, (chains.size_of(path, file.name) or 0) // (8 + 4 * len(saved.columns_of(file))))
        for _, saved, file in files
    )
    newest = [of_link for of_link in files if of_link[0].generation == files[-1][0].generation]
    rows = 0
    for link, saved, file in newest:
        # Keys are as good as random: each rank that reads a file gets as many of its rows.
        readers = sum(
            variable.placement.may_hold(rank, variable.world_size, saved.placement, file.rank, link.world_size)
            for rank in range(variable.world_size)
        )
        readers = min(readers, variable.placement.num_shards(variable.world_size))
        rows += math.ceil(file.num_held() / max(readers, 1))
    return min(room, rows, variable.capacity)
