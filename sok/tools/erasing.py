"""`erase`: a user's rows leave tables, checkpoints, exports and dumps, with a report."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.base.types import PathLike, TensorLike
from sok.checkpoint import background, erasing
from sok.checkpoint.arguments import Tables, tables_by_saved_name
from sok.checkpoint.erasing import Wanted
from sok.compat.formats import erasing as dumps
from sok.job import context
from sok.job.agreement import check_equal, together
from sok.saved_model import erasing as exports_without
from sok.table import on_servers
from sok.table.table import EmbeddingVariable
from sok.tools.places import Place, places_under


@dataclasses.dataclass(frozen=True)
class ErasedFrom:
    """What became of one table, checkpoint, export or dump."""

    path: str  # or the name of the table
    kind: str
    found: int  # keys, of each table
    removed: int
    left: str = ""  # what has to be made anew or removed, and how

    def __str__(self) -> str:
        what = f"{self.found} found, {self.removed} removed" if self.found else "not there"
        return f"{self.kind} {self.path}: {self.left or what}"


@dataclasses.dataclass(frozen=True)
class ErasureReport:
    """What `sok.erase` has done."""

    keys: int  # how many it was about
    places: tuple[ErasedFrom, ...]
    nowhere: tuple[int, ...]  # of the keys, those that were in no table and no file

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be made anew or removed by hand."""
        return not any(place.left for place in self.places)

    def __str__(self) -> str:
        lines = [f"{self.keys} keys, of which {len(self.nowhere)} were nowhere", *map(str, self.places)]
        return "\n".join([*lines, "complete" if self.is_complete else "NOT COMPLETE: see above"])


def erase(
    tables: Tables | str | Sequence[str],
    keys: TensorLike | Mapping[str, TensorLike],
    checkpoints: Sequence[PathLike] = (),
    exports: Sequence[PathLike] = (),
) -> ErasureReport:
    """Removes rows of keys, with all optimizer slots, from tables and from the files that were made of them.

    A checkpoint that has one of the keys, as a row or as the note of an increment that it was erased, becomes a full
    one without them, written and put into place as `sok.compact` does it: killed at any moment, it is the whole old one
    or the whole new one, and the same call again completes the work. Then no file in its folder has a key or its row
    any more, which is looked up. A checkpoint without the keys stays as it is, but for what interrupted saves have
    left, which goes. Exports are rewritten as safely: of a native one each table's file, of others that of
    all variables. What cannot be rewritten is listed, with what to do.

    Args:
        tables: which tables are meant. Embedding variables, layers, a model, or a list of these, as for `sok.save`: the
            rows leave them too. Or names, of tables that this program does not have: only files are looked through.
        keys: [n] integers, of all of `tables`; or a mapping from names of tables to their own.
        checkpoints: folders of `sok.save`, `sok.CheckpointManager` and so on, or folders that have some below.
        exports: folders of `sok.export_saved_model`, likewise.

    Returns:
        An `ErasureReport`, the same on all workers: `print` it. Its `places` say of each table and each path what was
        found, what was removed and (`left`) what has to be made anew and how; `nowhere` has the keys that were in none.

    Raises:
        TypeError, ValueError: the arguments make no sense, or differ between workers.
        FileNotFoundError: there is nothing at a path.
        CheckpointError: a checkpoint is damaged (a ValueError).
        RuntimeError: another job of this machine, which still runs, saves into one of the folders; the tables are of a
            v1 graph. Nothing was erased.
        tf.errors.OpError, OSError: another thing that the system says. What was erased stays erased: call it again.

    Collective: call it on all workers between steps. Each erases its part of the tables; worker 0 rewrites the files,
    one after the other, with room on the disk for the rows of one checkpoint once more. An error is raised on all.

    In tables an erasure is a deletion: the next incremental save says so to those that follow. Into a folder that was
    rewritten here it writes all rows, and followers read all of them.

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="users")
        >>> table.assign([3, 5], [[1.0, 2.0], [3.0, 4.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save(folder, [table])
        ...     report = sok.erase([table], [3, 4], checkpoints=[folder])
        ...     sok.restore(folder, [table])
        >>> [(place.kind, place.found, place.removed) for place in report.places], report.nowhere
        ([('table', 1, 1), ('checkpoint', 1, 1)], (4,))
        >>> int(table.size()), report.is_complete
        (1, True)
    """
    job = context.get_job()
    transport = job.transport
    background.finish(job)
    live: dict[str, EmbeddingVariable] = {}
    wanted, places = Wanted(), list[Place]()

    def plan() -> Any:
        nonlocal live, wanted, places
        names, live = _tables(tables)
        wanted = _wanted(names, live, keys)
        given = [[str(path) for path in paths] for paths in (checkpoints, exports)]
        if transport.rank == 0:
            places = places_under([*checkpoints, *exports])
            for place in places:
                if place.kind == "checkpoint":
                    erasing.check_erasable(place.path)
        words = repr(sorted(wanted.of_tables.items())).encode()
        asked = hashlib.sha256(words).hexdigest()[:16]  # there may be millions
        return [sorted(live), asked, *given]

    check_equal(
        together(transport, "sok/erase/plan", plan),
        "sok.erase: [tables, a hash of names and keys, checkpoints, exports]",
    )
    found_by_rank = together(
        transport, "sok/erase/tables", lambda: [_erase_rows(n, live[n], wanted) for n in sorted(live)]
    )

    def files() -> Any:
        if transport.rank != 0:
            return None
        return [_erase_from(place, wanted) for place in places]

    of_files = together(transport, "sok/erase/files", files)[0]
    found = [{key for of_rank in found_by_rank for key in of_rank[place]} for place in range(len(live))]
    in_tables = [
        ErasedFrom(name, "table", len(of_table), len(of_table))
        for name, of_table in zip(sorted(live), found, strict=True)
    ]
    seen = {key for of_table in found for key in of_table}.union(*(of_file for of_file, *_ in of_files))
    in_files = [ErasedFrom(*said) for _, *said in of_files]
    return ErasureReport(len(wanted.all), (*in_tables, *in_files), tuple(sorted(wanted.all - seen)))


def _tables(tables: Any) -> tuple[list[str], dict[str, EmbeddingVariable]]:
    """The names of the tables that are meant, and those that are here."""
    if isinstance(tables, str):
        return [tables], {}
    if isinstance(tables, (list, tuple)) and tables and all(isinstance(table, str) for table in tables):
        return list(tables), {}
    live = tables_by_saved_name(tables)
    for table in live.values():
        if table._in_graph_mode:
            raise RuntimeError(
                f"sok.erase: table '{table.table_name}' is of a v1 graph: run table.erase(keys) in its session, and "
                "pass its name here for the files."
            )
    if not tf.executing_eagerly():
        raise RuntimeError(
            "sok.erase must be called outside of functions: files cannot be written while one is traced."
        )
    return list(live), live


def _wanted(names: Iterable[str], live: Mapping[str, EmbeddingVariable], keys: Any) -> Wanted:
    by_name = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(names, keys)
    if unknown := sorted(set(by_name) - set(names)):
        raise ValueError(f"`keys` names tables {unknown} that are not among `tables`: {sorted(names)}.")
    found = {}
    for name, of_table in by_name.items():
        given = live[name]._as_keys(of_table).numpy() if name in live else np.asarray(of_table, object)
        flat = given.ravel().tolist()
        if not all(isinstance(key, (int, np.integer)) for key in flat):
            raise ValueError(f"`keys` of table '{name}' must be integers. Received: {flat[:10]!r}.")
        found[name] = tuple(sorted(set(map(int, flat))))
    return Wanted(of_tables=found)


def _erase_rows(name: str, table: EmbeddingVariable, wanted: Wanted) -> list[int]:
    """Removes this worker's rows, or those of all servers; the keys of those."""
    return [key for shards in on_servers.held([table]) for key in _erase_shard(name, shards[0], wanted)]


def _erase_shard(name: str, table: EmbeddingVariable, wanted: Wanted) -> list[int]:
    keys = np.array(wanted.of_tables.get(name, ()), table.key_dtype.as_numpy_dtype)
    keys = keys[table.placement.holds_keys(keys, table.rank, table.world_size)]
    if table.num_keys is not None:
        keys = keys[(keys >= 0) & (keys.astype(np.uint64) < table.num_keys)]
    _, places = _ops.lib().sok_table_lookup(table.handle, keys, False, dim=table.local_dim)
    is_there = places.numpy() >= 0
    if table.options.keeps_history:  # or waits for a row
        is_there |= table.history(keys)[0].numpy() > 0
    table.erase(keys)
    return keys[is_there].tolist()


def _erase_from(place: Place, wanted: Wanted) -> list[Any]:
    """The keys that were there, and the members of its `ErasedFrom`."""
    left = ""
    if place.kind == "checkpoint":
        found = erasing.erase_from(place.path, wanted)
    elif place.kind == "unfinished save":
        found, left = [], "was never completed, and may hold rows: remove its files"
    elif place.kind == "dump":
        found, left = dumps.erase_from(place.path, wanted)
    elif place.kind == "file":
        found, left = [], "is of Keras or SOK v1, and was not looked into: save it anew from the erased tables"
    else:
        found, left = exports_without.erase_from(place.path, wanted)
    number = len({(one.table, one.key) for one in found})
    return [sorted({one.key for one in found}), place.path, place.kind, number, 0 if left else number, left]
