"""Checkpoints as a feed: what each incremental save has changed, for those who serve while others train."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from sok.base.errors import CheckpointError
from sok.base.locks import ReadersAndWriter
from sok.base.types import PathLike
from sok.checkpoint import manifest as manifests
from sok.checkpoint.arguments import Tables, calls_for, tables_by_saved_name
from sok.checkpoint.dense import Reader, named, values_for
from sok.checkpoint.lease import seconds_since
from sok.checkpoint.manifest import Link, Manifest, SavedTable, ShardFile, read_manifest
from sok.checkpoint.native import EagerCalls, SessionCalls, verify_shard
from sok.checkpoint.restoring import TRIES, can_hold, columns_for, is_superseded, is_wanted, restore, waits_for_nothing
from sok.checkpoint.summary import check_summary
from sok.job.agreement import check_equal, together
from sok.job.job import job_of
from sok.job.transport.base import Transport
from sok.table import on_servers, rules
from sok.table.counted import with_counted
from sok.table.policies import counted_by
from sok.table.state import assign_columns, set_step

_HEADER = struct.Struct("<IIQII")
_ROWS, _ERASED, _END = 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of what one save has changed in one table: some 4 MiB at most."""

    generation: str  # the save
    table: str  # the table's name
    keys: np.ndarray  # [n] of the table's key dtype
    rows: np.ndarray  # [n, D] float32: their rows now; of a table whose rows are cut, some columns of them
    erased: np.ndarray  # [m] of the key dtype: keys that have no row any more
    step: int | None = None  # of the table when it was saved; None: not known
    first_column: int = 0  # of `rows`

    def apply(self, tables: Tables) -> None:
        """Stores it in the table of that name among `tables` (as for `sok.restore`), if it is there.

        Each worker takes its own keys. Not collective; eager only.
        """
        table = tables_by_saved_name(tables).get(self.table)
        if table is None:
            return
        if len(self.erased):
            table.erase(self.erased)
        if len(self.keys):
            assign_columns(table, self.keys, self.rows, self.first_column)
        if self.step is not None:
            set_step(table, self.step)


def deltas(path: PathLike, after: str | None = None) -> Iterator[Delta]:
    """Gives what the saves after `after` have changed, oldest first, piece by piece.

    Erased keys of a save come before its rows, and so do those that an eviction took. Keys that wait for a row are not
    here. Each save gives at least one piece per table, which may be empty. Pass
    the `generation` of the last piece as `after` the next time.

    Args:
        path: a folder into which `sok.save(..., incremental=True)` saves.
        after: the generation that is known already: `generation` of a piece, or of `sok.checkpoint.read_manifest(path)`
            when it was restored. None: begins with all rows of the chain's full save.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: `after` is not in the chain: a full save has taken its place. Begin anew: `sok.restore`, or
            `after=None`.
        CheckpointError, tf.errors.DataLossError: a file is damaged. Each is checked before a piece of it is given.
        tf.errors.NotFoundError: a file went with its chain, as a full save or `sok.compact` has taken its place
            meanwhile. Begin anew.

    Not collective; needs memory for two blocks of 4 MiB. Rows are as they were when their save was made; a row that no
    step has touched is not here, though an exact Adam moves it, too (`sok.follow(..., slots=True)` takes that over).

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="fed")
        >>> table.assign([3, 5], [[1.0, 2.0], [3.0, 4.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save(folder, [table])
        ...     known = sok.checkpoint.read_manifest(folder).generation
        ...     table.assign([5], [[5.0, 6.0]])
        ...     _ = table.erase([3])
        ...     sok.save(folder, [table], incremental=True)
        ...     for piece in sok.deltas(folder, after=known):
        ...         print(piece.table, piece.keys, piece.rows, piece.erased)
        fed [] [] [3]
        fed [5] [[5. 6.]] []
    """
    path = os.path.abspath(os.fspath(path))
    manifest = read_manifest(path)
    newer = links_after(manifest, after)
    if newer is None:
        raise ValueError(
            f"{path}: the save {after} is not in the chain that lies there: "
            f"{', '.join(link.generation for link in manifest.links)}. Begin anew: restore, or after=None."
        )
    for link in newer:
        for table in link.tables:
            if counted_by(table.name) is not None:
                continue
            yield from pieces_of(path, link, table)


def pieces_of(path: str, link: Link, table: SavedTable) -> Iterator[Delta]:
    """What one save has changed in one table: at least one piece."""
    num_pieces = 0
    for file in table.files:
        for piece in _pieces(path, link, table, file):
            num_pieces += 1
            yield piece
    if num_pieces == 0:
        yield _piece(link, table)


def follow(
    path: PathLike,
    variables_or_model: Tables,
    *,
    slots: bool = False,
    dense: bool | Mapping[str, tf.Variable] = False,
    log_dir: PathLike | None = None,
) -> Follower:
    """Returns a `Follower`, whose `poll` brings tables up to what another job has saved into `path` last.

    Args:
        path: the folder.
        variables_or_model: as for `sok.restore`; eager tables, at any number of workers.
            Give them the seed and initializer of those that are trained, or keys that were never seen start otherwise.
        slots: whether to take over optimizer slots, too. They double or triple the memory; for an exact Adam, rows
            that no step has touched then move as in the job that trains. Without, they stay as they were last saved.
        dense: True: the dense weights of the model, too, which `sok.save(..., dense=True)` has saved with the rows of
            the same step; or variables by the names that they have there.
        log_dir: a folder for TensorBoard: `feed/lag_seconds` of rank 0 at each `poll`, by the number of the save.

    Example:
        >>> import sok, tempfile
        >>> trained, served = (sok.EmbeddingVariable(2, 10, name=n, seed=1) for n in ("trained", "served"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     follower = sok.follow(folder, {"trained": served})
        ...     for value in (1.0, 2.0):
        ...         trained.assign([7], [[value, value]])
        ...         sok.save(folder, [trained], incremental=True)
        ...         print(follower.poll(), served.sparse_read([7]).numpy().tolist(), follower.poll())
        True [[1.0, 1.0]] False
        True [[2.0, 2.0]] False
    """
    return Follower(path, variables_or_model, slots, dense, log_dir)


class Follower:
    """Tables that follow the checkpoints in a folder: see `sok.follow`."""

    def __init__(
        self,
        path: PathLike,
        variables_or_model: Tables,
        slots: bool,
        dense: bool | Mapping[str, tf.Variable] = False,
        log_dir: PathLike | None = None,
    ) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._tables = tables_by_saved_name(variables_or_model)
        for table in self._tables.values():
            on_servers.refuse(table, "sok.follow", "Call sok.restore.")
        self._slots = bool(slots)
        self._dense = {} if dense is False else named(dense, variables_or_model)
        self._writer = None if log_dir is None else tf.summary.create_file_writer(os.fspath(log_dir))
        self._lock = ReadersAndWriter()
        self._is_changing = False  # and this poll keeps readers out
        self._created: str | None = None
        self._generation: str | None = None
        self._seen: tuple[int, ...] | None = None  # the manifest, if all that it lists is applied; rank 0 looks
        if isinstance(calls_for(list(self._tables.values()), None), SessionCalls):
            raise ValueError("sok.follow is for eager tables; in a v1 graph call sok.restore.")

    @property
    def generation(self) -> str | None:
        """The save that the tables hold; None before the first one."""
        return self._generation

    @property
    def lag(self) -> float | None:
        """Seconds since the save was made that the tables hold, by the clocks of its host and this one; None: they hold
        none. It grows between saves, too: with one every minute it is at most about a minute."""
        return None if self._created is None else max(0.0, seconds_since(self._created))

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all rows and dense weights are those of one save.

        `poll` waits for who reads, and who wants to read for a `poll` that has begun to change something. For threads
        that serve while another one polls. Do not poll inside. After a `poll` that has raised an error in the middle of
        its changes they may be of two saves, until the next one that raises none.

        Example:
            >>> import sok, tempfile
            >>> table = sok.EmbeddingVariable(2, 10, name="read")
            >>> follower = sok.follow(tempfile.mkdtemp(), {"trained": table})
            >>> with follower.reading():
            ...     table.sparse_read([7]).shape.as_list()
            [1, 2]
        """
        return self._lock.reading()

    def poll(self) -> bool:
        """Brings the tables up to the newest checkpoint. Returns whether they were behind it. Collective.

        Deltas are applied to the tables as they stand, block by block: a lookup meanwhile sees whole rows, some of them
        new, but inside `reading`, where all are of one save. Where another full save has taken the chain's place, it is
        read as a whole and swapped in at once. Files are checked before the first row changes.

        Raises:
            as `sok.restore`, except that a missing checkpoint is none yet: False. After an error in the middle of a
            delta the next `poll` reads the whole checkpoint.
        """
        transport = job_of(self._tables.values()).transport
        with contextlib.ExitStack() as changing:  # once something has changed, nobody reads before all has
            for left in reversed(range(TRIES)):
                has_changed = self._poll_once(transport, changing, is_last=left == 0)
                if has_changed is not None:
                    break
        if self._writer is not None and self.lag is not None and self._generation is not None and transport.rank == 0:
            with self._writer.as_default():
                tf.summary.scalar("feed/lag_seconds", self.lag, step=int(self._generation[1:].partition("-")[0]))
            self._writer.flush()
        return bool(has_changed)

    def _poll_once(self, transport: Transport, changing: contextlib.ExitStack, is_last: bool) -> bool | None:
        """As `poll`; None if another checkpoint took the place of the one that was being read."""
        seen: tuple[int, ...] | None = None

        def look() -> list[str | None]:
            nonlocal seen
            if transport.rank == 0:
                seen = manifests.stamp(self._path)
            is_new = seen is not None and (seen != self._seen or self._generation is None)
            return [manifests.read_bytes(self._path).decode() if is_new else None, self._generation]

        said = together(transport, "sok/follow/look", look)
        check_equal([at for _, at in said], "sok.follow: the save that was applied last")
        if said[0][0] is None:
            return False
        # Rank 0's: another save may come between two ranks' reading.
        manifest = manifests.from_bytes(said[0][0].encode(), os.path.join(self._path, manifests.NAME))
        newer = links_after(manifest, self._generation) if self._generation is not None else None
        if newer is not None and not newer:
            self._seen = seen
            return False
        values: dict[str, tf.Tensor] = {}
        change: Callable[[], None] = _nothing

        def prepare() -> None:
            nonlocal values, change
            values = self._dense_of(manifest)
            if newer is not None:
                change = self._checked(newer, manifest)

        def done_by_all(name: str, part: Callable[[], None]) -> bool:
            """Or else another checkpoint has taken the place of this one."""

            def tried() -> bool:
                try:
                    part()
                except Exception:
                    if is_last or not is_superseded(self._path, manifest.generation):
                        raise
                    return False
                return True

            return all(together(transport, name, tried))

        if not done_by_all("sok/follow/prepare", prepare):
            return None
        known, self._generation = self._generation, None  # if this fails, all is read the next time
        if not self._is_changing:
            changing.enter_context(self._changing())
        if newer is None:
            restored = restore(self._path, self._tables, (), slots=self._slots, _give_generation=True)
            if restored != manifest.generation and self._dense:  # the rows are of a newer save
                if is_last:
                    raise CheckpointError(f"{self._path}: saves take each other's place faster than they can be read.")
                return None
        elif not done_by_all("sok/follow/apply", change):
            return None
        else:
            restored = manifest.generation
        for name, value in values.items():
            self._dense[name].assign(value)
        self._generation, self._created = restored, manifest.created
        if newer is not None:
            self._seen = seen
        return restored != known

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock.writing():
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False

    def _dense_of(self, manifest: Manifest) -> dict[str, tf.Tensor]:
        if not self._dense:
            return {}
        if manifest.dense is None:
            raise ValueError(f"{self._path}: the save has no dense weights. Save with dense=True, or follow without.")
        return values_for(Reader(self._path, manifest.dense), self._dense)

    def _checked(self, links: list[Link], manifest: Manifest) -> Callable[[], None]:
        """What applies the changes of these saves, whose files have been looked through."""
        calls = EagerCalls()
        work = []
        tables = with_counted(self._tables)
        for link in links:
            for name, variable in tables.items():
                if waits_for_nothing(link, name, variable):
                    continue
                if name not in link.names:
                    raise ValueError(f"{self._path} holds no table '{name}'.")
                table = link.table(name)
                work += [(link, table, file, variable) for file in table.files if can_hold(file, table, link, variable)]
        for link, table, file, _ in work:
            name = os.path.join(self._path, file.name)
            check_summary(name, link, table, file, verify_shard(name))

        def change() -> None:
            for _, table, file, variable in work:
                sets = [(s.name, s.name) for s in table.slot_sets if is_wanted(s.rule, variable, self._slots)]
                name = os.path.join(self._path, file.name)
                calls.load(variable, variable.handle, name, sets, columns_for(file, table, variable))
            for name, variable in self._tables.items():
                calls.set_step(variable, manifest.step_of(name))

        return change


def _nothing() -> None:
    """Changes nothing."""


def links_after(manifest: Manifest, generation: str | None) -> list[Link] | None:
    """The links after that save; None if it is not in the chain."""
    links = list(manifest.links)
    if generation is None:
        return links
    for place, link in enumerate(links):
        if generation in (link.generation, link.same_as):
            return links[place + 1 :]
    return None


def _pieces(path: str, link: Link, table: SavedTable, file: ShardFile) -> Iterator[Delta]:
    """The blocks of one file, which is checked before."""
    name = os.path.join(path, file.name)
    summary = verify_shard(name)
    check_summary(name, link, table, file, summary)
    columns = table.columns_of(file)
    dim = len(columns)
    slots = sum(rules.find(slot_set["rule"]).slot_floats(dim) for slot_set in summary["slot_sets"])
    row_bytes = 8 + 4 * (dim + slots)
    with open(name, "rb") as opened:
        while True:
            _, kind, length, _, _ = _HEADER.unpack(opened.read(_HEADER.size))
            payload = opened.read(length)
            if kind == _END:
                return
            if kind not in (_ROWS, _ERASED):
                continue  # the head
            n = int.from_bytes(payload[:8], "little")
            if len(payload) != 8 + n * (row_bytes if kind == _ROWS else 8):
                raise CheckpointError(f"{name}: has changed while it was read.")
            keys = np.frombuffer(payload, np.uint64, n, 8).astype(table.key_dtype)
            if kind == _ERASED:
                yield _piece(link, table, erased=keys)
            else:
                rows = np.frombuffer(payload, np.float32, n * dim, 8 + 8 * n)
                yield _piece(link, table, columns.start, keys=keys, rows=rows.reshape(n, dim).copy())


def _piece(link: Link, table: SavedTable, first_column: int = 0, **parts: np.ndarray) -> Delta:
    empty: Mapping[str, np.ndarray] = {
        "keys": np.empty(0, table.key_dtype),
        "rows": np.empty((0, table.dim), np.float32),
        "erased": np.empty(0, table.key_dtype),
    }
    return Delta(link.generation, table.name, **{**empty, **parts}, step=table.step, first_column=first_column)
