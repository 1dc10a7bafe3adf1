"""`sok inspect` and `sok verify`: checkpoints, and models that were exported, from the command line."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sok.checkpoint.erasing import Record, Wanted
from sok.checkpoint.manifest import Link, Manifest, SavedSlotSet, SavedTable, read_manifest
from sok.table import rules
from sok.tools import folders, places


def _told(command: Callable[..., int]) -> Callable[..., int]:
    """`command`, which gives exit status 1 and the error's words where it raises one that a user can mend."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> int:
        try:
            return command(*args, **kwargs)
        except (OSError, ValueError, ImportError) as error:
            print(error, file=sys.stderr)
            return 1

    return run


@_told
def inspect(path: str, as_json: bool = False, plot: str | None = None) -> int:
    """Prints what a checkpoint, a manager's folder or an export holds; the exit status.

    Loads no TensorFlow, but for an export. `plot`: of a checkpoint the picture to draw as well; '' for the default
    name, None for none.
    """
    path = path.rstrip("/") or path
    if folders.is_export(path) or folders.is_managed(path):
        if plot is not None:
            raise ValueError(f"{path}: --plot draws checkpoints of tables: the folders whose names end in '.sok'.")
        print(_inspected(path, as_json))
        return 0
    manifest = read_manifest(path)
    if plot is not None:
        from sok.tools import picture

        drawn = picture.plot(path, plot or None)
        print(f"drawn: {drawn}", file=sys.stderr)
    print(json.dumps(dataclasses.asdict(manifest), indent=2) if as_json else described(path, manifest))
    return 0


def _inspected(path: str, as_json: bool) -> str:
    """What is said of an export, or of a manager's folder."""
    if folders.is_export(path):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        export = folders.export(path)
        return json.dumps(export, indent=2) if as_json else folders.export_lines(path, export, _bytes)
    found = folders.managed(path)
    if not as_json:
        return folders.managed_lines(path, found, described, _bytes)
    for one in found:
        one["tables"] = one["tables"] and dataclasses.asdict(one["tables"])
    return json.dumps(found, indent=2)


@_told
def verify(path: str) -> int:
    """Prints whether a checkpoint, all of a manager's folder, or the tables of an export are whole; the exit status."""
    path = path.rstrip("/") or path
    if folders.is_export(path):
        check = _verify_export
    elif folders.is_managed(path):
        check = _verify_managed
    else:
        check = _verify_checkpoint
        read_manifest(path)  # says what is missing before TensorFlow is loaded, which takes seconds
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    wrong, found = check(path)
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    print(f"{path}: whole: {found}")
    return 0


def _verify_checkpoint(path: str) -> tuple[list[str], str]:
    """What is wrong with a checkpoint, and what it holds."""
    from sok.checkpoint import verifying

    wrong, manifest = verifying.verify(path), read_manifest(path)
    files = sum(len(link.files) for link in manifest.links)
    chain = f", {_count(len(manifest.before), 'delta')}" if manifest.before else ""
    return wrong, f"{_count(len(manifest.tables), 'table')}, {_count(files, 'file')}{chain}, {_bytes(manifest.bytes)}"


def _verify_managed(path: str) -> tuple[list[str], str]:
    """The same of all checkpoints of a manager's folder, or of the one with that prefix."""
    from sok.checkpoint.verifying import verify_dense

    prefixes = folders.listed(path)[0]
    if not prefixes:
        return [f"{os.path.join(path, folders.STATE)}: lists no checkpoint."], ""
    wrong, lines = [], [_count(len(prefixes), "checkpoint")]
    for prefix in prefixes:
        bad, dense = verify_dense(prefix)
        tables = "no tables"
        if os.path.isdir(f"{prefix}.sok"):
            try:
                damaged, tables = _verify_checkpoint(f"{prefix}.sok")
                bad += damaged
            except (OSError, ValueError) as error:  # the manifest: the other checkpoints may be whole
                bad.append(str(error))
        wrong += bad
        lines.append(f"{os.path.basename(prefix)}: {'damaged' if bad else f'{_bytes(dense)} of variables, {tables}'}")
    return wrong, "\n".join(lines)


def _verify_export(path: str) -> tuple[list[str], str]:
    from sok.saved_model.verifying import verify_export

    tables, wrong = verify_export(path)
    size = sum(head.file_bytes for head in tables)
    return wrong, f"native export of {_count(len(tables), 'table')}, {_bytes(size)}"


@_told
def plot_profile(traces: Sequence[str], target: str | None, first: int, steps: int) -> int:
    """Draws traces of `sok.profile`; the exit status."""
    from sok.tools import timeline

    drawn = timeline.plot(traces, target or f"{os.path.splitext(os.path.basename(traces[0]))[0]}.png", first, steps)
    print(f"drawn: {drawn}", file=sys.stderr)
    return 0


@_told
def compact(path: str) -> int:
    """Makes one full checkpoint of a chain and says what became of it; the exit status."""
    before = read_manifest(path)
    if not before.before:
        print(f"{path}: {before.generation} is a full checkpoint: nothing to do")
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from sok.checkpoint import compacting
    from sok.job.agreement import plain_text

    try:
        compacting.compact(path)
    except Exception as error:
        print(plain_text(error), file=sys.stderr)
        return 1
    after = read_manifest(path)
    print(
        f"{path}: {_count(len(before.links), 'save')} of {_bytes(before.bytes)} are now {after.generation} of "
        f"{_bytes(after.bytes)}"
    )
    return 0


def find(key: int, paths: Sequence[str], table: str | None = None, as_json: bool = False) -> int:
    """Prints where a key lies; 0 if it lies anywhere, 1 if nowhere, 2 if that cannot be said."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    wanted = Wanted(everywhere=(key,)) if table is None else Wanted(of_tables={table: (key,)})
    found: list[Record] = []
    unsaid: list[str] = []
    try:
        there = places.places_under(paths)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for place in there:
        try:
            found += list(places.records_in(place, wanted))
            unsaid += places.what_cannot_be_said(place)
        except Exception as error:  # TensorFlow's own too: what else there is can be searched
            unsaid.append(str(error))
    if as_json:
        print(json.dumps({"key": key, "found": [dataclasses.asdict(one) for one in found], "not_searched": unsaid}))
    else:
        print("\n".join(map(str, found)) or f"key {key}: nowhere")
    for line in unsaid:
        print(line, file=sys.stderr)
    return 0 if found else 2 if unsaid else 1


def described(path: str, manifest: Manifest) -> str:
    """The lines of `sok inspect`."""
    lines = [
        f"{path}: {manifest.generation}, saved {manifest.created} by {_count(manifest.world_size, 'worker')} "
        f"with sok {manifest.sok_version}, {_bytes(manifest.bytes)}"
    ]
    for number, link in enumerate(manifest.links if manifest.before else ()):
        lines.append(_link_line(link, is_delta=number > 0))
    lines += [line for table in manifest.tables for line in _table_lines(table)]
    for state in manifest.optimizers:
        rate = "" if state.learning_rate is None else f", learning rate {state.learning_rate:g}"
        lines.append(f"optimizer '{state.slot_set}': {state.rule}, {_count(state.iterations, 'step')}{rate}")
    return "\n".join(lines)


def _link_line(link: Link, is_delta: bool) -> str:
    rows, erased = (sum(getattr(file, what) for file in link.files) for what in ("rows", "erased"))
    changes = f"{_count(rows, 'row')} changed, {_count(erased, 'key')} erased" if is_delta else _count(rows, "row")
    return (
        f"    {'delta' if is_delta else 'full '} {link.generation}: {changes}, {_count(link.world_size, 'worker')}, "
        f"{link.created}, {_bytes(sum(file.bytes for file in link.files))}"
    )


def _table_lines(table: SavedTable) -> list[str]:
    kind = "hashed" if table.hashed else "identity"
    place = table.placement.words and f", {table.placement.words}"
    lines = [
        f"table '{table.name}': {_count(table.rows, 'row')} of dim {table.dim}, {kind} {table.key_dtype} keys{place}, "
        f"capacity {table.capacity:,} per worker, {_bytes(table.bytes)}"
        + ("" if table.step is None else f", step {table.step:,}")
    ]
    if len(table.files) > 1:
        held = (file.rows if file.held is None else file.held for file in table.files)
        lines.append(f"    rows by rank: {', '.join(f'{rows:,}' for rows in held)}")
    for slot_set in table.slot_sets:
        calls = f", {_count(slot_set.calls, 'call')}" if slot_set.calls else ""
        lines.append(f"    slots '{slot_set.name}': {slot_set.rule}, {_slots_of(slot_set)} per row{calls}")
    return lines


def _slots_of(slot_set: SavedSlotSet) -> str:
    scalars = [slot.name for slot in rules.slots_of(slot_set.rule, slot_set.num_slots) if slot.scalar]
    numbers = f" and {_count(len(scalars), 'number')} ({', '.join(scalars)})" if scalars else ""
    return _count(slot_set.num_slots - len(scalars), "vector") + numbers


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    """A size for people.

    >>> _bytes(512), _bytes(2_400_000)
    ('512 B', '2.4 MB')
    """
    size, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"
