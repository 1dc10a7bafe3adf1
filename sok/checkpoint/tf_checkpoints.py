"""Tables beside TensorFlow's checkpoints: what `tf.train.Checkpoint` calls when it meets one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import registration

from sok.base.patching import Here
from sok.base.types import Session
from sok.checkpoint.lease import NAME as LEASE
from sok.checkpoint.lease import Lease, forget, of_series
from sok.checkpoint.manifest import NAME as MANIFEST
from sok.checkpoint.manifest import make_folder
from sok.job.job import job_of
from sok.table.table import is_embedding_variable

SUFFIX = ".sok"
OBJECTS = "objects.json"
SAVER = "sok.tables"
_FORMAT = "sok tables beside a TensorFlow checkpoint"

# Where a collective saver of ours wants to know the tables that TensorFlow meets, and moves their rows itself.
_meeting = Here()


@contextlib.contextmanager
def meeting() -> Iterator[dict[str, Any]]:
    """Within it TensorFlow's checkpoints leave rows alone; gives the tables that they meet, by the objects' names.

    To be used where `save_tables` has written the rows before.
    """
    met: dict[str, Any] = {}
    with _meeting.inside(met):
        yield met


def folder_of(prefix: str) -> str:
    """Where the tables of a TensorFlow checkpoint are.

    Raises:
        ValueError: `prefix` is of a remote file system, which tables are not written to.
    """
    if "://" in os.fspath(prefix):
        raise ValueError(
            f"{prefix}: embedding tables are saved in folders of the system only. Save to one, mounted storage say, "
            "and copy the files."
        )
    return os.path.abspath(prefix) + SUFFIX


def remove_without_checkpoint(prefixes: Iterable[str]) -> None:
    """Removes tables of checkpoints that are gone. (Of what a manager has dropped from its list it may keep some.)"""
    for prefix in prefixes:
        if not os.path.exists(prefix + ".index"):
            shutil.rmtree(folder_of(prefix), ignore_errors=True)


def _on_save(trackables: Mapping[str, Any], file_prefix: tf.Tensor) -> list[Any]:
    if _meeting.value is not None:
        _meeting.value.update(trackables)
        _with_text(lambda given: note_objects(given.removesuffix(f"-{SAVER}"), trackables), file_prefix)
    elif job_of(trackables.values()).size > 1 or any(table._in_graph_mode for table in trackables.values()):
        for table in trackables.values():
            table.warn_not_saved()
    else:
        _with_text(lambda given: _save_alone(given.removesuffix(f"-{SAVER}"), trackables), file_prefix)
    return []  # nothing that TensorFlow has to merge into its own files


def _on_restore(trackables: Mapping[str, Any], merged_prefix: tf.Tensor) -> None:
    if _meeting.value is not None:
        _meeting.value.update(trackables)
    elif job_of(trackables.values()).size > 1 or any(table._in_graph_mode for table in trackables.values()):
        warn_not_restored(trackables, "a worker alone cannot restore tables; use sok.CheckpointManager on all workers.")
    else:
        _with_text(lambda prefix: restore_tables(prefix, trackables), merged_prefix)


def _with_text(body: Callable[[str], None], text: Any) -> None:
    """Calls `body` with a string tensor's value, now or when the function that is being traced runs."""
    if tf.executing_eagerly():
        body(os.fsdecode(text.numpy() if tf.is_tensor(text) else text))
    else:
        tf.py_function(lambda value: body(os.fsdecode(value.numpy())), [text], [])


def _save_alone(prefix: str, trackables: Mapping[str, Any]) -> None:
    if (stem := _stem(prefix)) is not None:
        make_folder(os.path.dirname(stem))
        lease = Lease(of_series(stem))
        lease.take()
        sweep(prefix, lease)
    save_tables(prefix, list(trackables.values()))
    note_objects(prefix, trackables)


def save_tables(prefix: str, tables: list[Any], **how: Any) -> Any:
    """Writes the rows beside the checkpoint `prefix`, as `sok.save` does; gives what that gives. Collective."""
    from sok.checkpoint.saving import save
    from sok.optimizers import claims

    return save(folder_of(prefix), tables, claims.optimizers_of(tables), **how)


def note_objects(prefix: str, trackables: Mapping[str, Any]) -> None:
    """Writes down which object of the checkpoint has which table: names of tables differ from program to program."""
    path = Path(folder_of(prefix), OBJECTS)
    tables = {name: table.table_name for name, table in trackables.items()}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"format": _FORMAT, "tables": tables}, indent=1))
    temporary.replace(path)


def restore_tables(prefix: str, trackables: Mapping[str, Any], session: Session | None = None) -> None:
    """Gives tables what lies beside the checkpoint `prefix`; warns if nothing does. Collective.

    In a v1 session the step counts of optimizers are left to the saver of the global variables.
    """
    from sok.checkpoint.manifest import read_manifest
    from sok.checkpoint.restoring import restore
    from sok.job.agreement import check_equal, together
    from sok.optimizers import claims

    folder = folder_of(prefix)
    said = together(
        job_of(trackables.values()).transport,
        "sok/beside/look",
        lambda: [_objects(folder), read_manifest(folder).generation] if os.path.isdir(folder) else None,
    )
    seen = check_equal(said, f"What lies in {folder}")
    if seen is None:
        warn_not_restored(trackables, f"there is no folder {folder}, where sok would have put them.")
        return
    if (stem := _stem(prefix)) is not None:
        forget(of_series(stem))  # what another job has saved there is known now
    names = seen[0]
    found = {names.get(name, table.table_name): table for name, table in trackables.items()}
    calls: list[Callable[[], None]] = []

    def names_of_sets(table: Any, saved: Any) -> dict[str, str]:
        counts = {state.slot_set: state.iterations for state in manifest.optimizers}
        sets = [claims.SavedSlots(s.name, s.rule, counts.get(s.name)) for s in saved.slot_sets]
        here = claims.names_here(table, sets)
        calls.append(lambda: claims.restored(table, sets, here))
        return here

    if session is not None:
        restore(folder, found, (), session=session)
        return
    manifest = read_manifest(folder)
    restore(folder, found, (), _names=names_of_sets)
    for call in calls:
        call()


def warn_not_restored(trackables: Mapping[str, Any], why: str) -> None:
    """Says that tables keep the rows that they have."""
    tables = ", ".join(sorted(f"'{table.table_name}'" for table in trackables.values()))
    warnings.warn(f"No rows were restored of embedding table {tables}: {why}", stacklevel=3)


def _objects(folder: str) -> dict[str, str]:
    from sok.base.errors import CheckpointError

    path = Path(folder, OBJECTS)
    if not path.exists():
        return {}
    try:
        noted = json.loads(path.read_text())
        tables = noted["tables"]
        if noted["format"] != _FORMAT or not all(isinstance(n, str) for pair in tables.items() for n in pair):
            raise ValueError("not names of objects and tables")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: {error!r}. Without this file tables are found by name.") from error
    return tables


def sweep(prefix: str, lease: Lease) -> None:
    """Removes tables of earlier checkpoints of the same name that a manager has deleted, or that never came to be.

    `lease` is of that series: none is removed if another job saves it now.
    """
    stem = _stem(prefix)
    folder = Path(os.path.abspath(prefix)).parent
    if stem is None or not folder.is_dir():
        return
    number, gone = int(prefix.rpartition("-")[2]), []
    for entry in folder.iterdir():
        other = re.fullmatch(re.escape(os.path.basename(stem)) + r"-(\d+)" + re.escape(SUFFIX), entry.name)
        is_gone = other and int(other[1]) < number and not Path(f"{entry}"[: -len(SUFFIX)] + ".index").exists()
        if is_gone and any((entry / name).exists() for name in (OBJECTS, MANIFEST, LEASE)):
            gone.append(entry)
    lease.check()  # after looking: what another job writes now is not among them
    for entry in gone:
        shutil.rmtree(entry, ignore_errors=True)


def leases_of(folder: str) -> list[str]:
    """The lease of the series to which the tables in `folder` belong; none if they are of no TensorFlow checkpoint."""
    stem = _stem(folder.removesuffix(SUFFIX)) if folder.endswith(SUFFIX) else None
    return [] if stem is None else [of_series(stem)]


def _stem(prefix: str) -> str | None:
    """What the checkpoints of a series are called before their numbers; None of one that has none."""
    numbered = re.fullmatch(r"(.*)-\d+", os.path.abspath(prefix))
    return numbered and numbered[1]


# Has TensorFlow's checkpoints give us the tables that they meet. Once: this module is loaded with the native library.
registration.register_checkpoint_saver(
    package=SAVER.partition(".")[0],
    name=SAVER.partition(".")[2],
    predicate=is_embedding_variable,
    save_fn=_on_save,
    restore_fn=_on_restore,
)
