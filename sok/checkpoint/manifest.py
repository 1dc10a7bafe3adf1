"""`manifest.json`: what a checkpoint is. Knows no TensorFlow, so that looking at one is quick."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sok.base.errors import CheckpointError
from sok.base.types import PathLike
from sok.checkpoint import placed
from sok.checkpoint.crc32c import crc32c
from sok.table.placement import Placement
from sok.table.rules import name_now

# 1: a full save; 2: with deltas; 3: with tables spread by hash, which the versions before do not know.
FORMAT, VERSION = "sok-checkpoint", 4
NAME = "manifest.json"
# Everything that a save leaves in the folder beside the manifest.
# A generation begins with its number: that of the one before, plus one.
GENERATION = re.compile(r"g[0-9]{6,}-[0-9a-f]{8}")
SHARD_NAME = re.compile(r"(g[0-9]{6,}-[0-9a-f]{8})-t[0-9]{4,}-r[0-9]{4,}\.shard")
# Those of dense weights, and what TensorFlow calls them until they are whole.
DENSE_NAME = re.compile(r"(g[0-9]{6,}-[0-9a-f]{8})-dense\.(?:index|data-[0-9]{5}-of-[0-9]{5})(?:\.tempstate[0-9]+)?")

_MAX_BYTES = 1 << 28  # a million shards


@dataclasses.dataclass(frozen=True)
class SavedSlotSet:
    """What one optimizer keeps in a table."""

    name: str
    rule: str
    num_slots: int
    calls: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", name_now(self.rule))


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """The rows of one table that one rank held."""

    name: str
    rank: int
    rows: int
    bytes: int
    digest: str
    erased: int = 0  # of a delta: keys that lost their rows
    held: int | None = None  # of a delta: rows that the rank held; of a full save that is `rows`

    def num_held(self) -> int:
        """Rows that the rank held."""
        return self.rows if self.held is None else self.held


@dataclasses.dataclass(frozen=True)
class SavedTable:
    """One table, with its shards."""

    name: str
    dim: int
    key_dtype: str
    hashed: bool
    placement: Placement
    capacity: int
    num_keys: int | None
    seed: int
    initializer: dict[str, Any]
    slot_sets: tuple[SavedSlotSet, ...]
    files: tuple[ShardFile, ...]
    step: int | None = None  # of the table; None: the sok that saved it did not count

    @property
    def rows(self) -> int:
        """Rows of the table when it was saved; of a delta that is more than its files hold."""
        held = [file.num_held() for file in self.files]
        return max(held, default=0) if self.placement.cuts_rows else sum(held)

    def columns_of(self, file: ShardFile) -> range:
        """The columns of rows that one of its files has."""
        if not self.placement.cuts_rows:
            return range(self.dim)
        # There are as many files as ranks, or all owners are named.
        return self.placement.part_of(file.rank, self.dim, len(self.files)).columns

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(file.bytes for file in self.files)


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """What one optimizer keeps outside the tables."""

    slot_set: str
    rule: str
    iterations: int
    learning_rate: float | None
    source: str | None = None  # of a rule of one's own: where it is declared, and a hash of it

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", name_now(self.rule))


@dataclasses.dataclass(frozen=True)
class DenseFiles:
    """Dense weights of a save: files of TensorFlow's checkpoints, whose names begin with `name`."""

    name: str
    variables: tuple[str, ...]  # what they are called there
    bytes: int


class _Tables:
    """What a link and a whole checkpoint have in common."""

    tables: tuple[SavedTable, ...]

    @property
    def names(self) -> list[str]:
        """What its tables are called."""
        return [table.name for table in self.tables]

    def table(self, name: str) -> SavedTable:
        """The table of that name. Raises KeyError if there is none."""
        return {table.name: table for table in self.tables}[name]

    @property
    def files(self) -> list[ShardFile]:
        """All its files."""
        return [file for table in self.tables for file in table.files]


@dataclasses.dataclass(frozen=True)
class Link(_Tables):
    """One save of a chain: the first has all rows, each later one what has changed since the one before."""

    generation: str
    sok_version: str
    world_size: int
    created: str
    tables: tuple[SavedTable, ...]
    same_as: str | None = None  # the generation whose chain `sok.compact` has made this of


@dataclasses.dataclass(frozen=True)
class Manifest(_Tables):
    """A checkpoint without its rows: the newest save, and the ones before that it builds on."""

    generation: str
    sok_version: str
    world_size: int
    created: str
    tables: tuple[SavedTable, ...]
    optimizers: tuple[OptimizerState, ...]
    before: tuple[Link, ...] = ()  # oldest first; none: the newest save is a full one
    same_as: str | None = None
    dense: DenseFiles | None = None  # of the newest save; None: it has saved tables alone

    @property
    def links(self) -> tuple[Link, ...]:
        """The chain, oldest first: one full save, then deltas."""
        newest = Link(self.generation, self.sok_version, self.world_size, self.created, self.tables, self.same_as)
        return (*self.before, newest)

    def step_of(self, name: str) -> int:
        """The step of a table; of one that was saved without, the most that its optimizers have counted."""
        table = self.table(name)
        if table.step is not None:
            return table.step
        counted = {state.slot_set: state.iterations for state in self.optimizers}
        return max((max(s.calls, counted.get(s.name, 0)) for s in table.slot_sets), default=0)

    @property
    def bytes(self) -> int:
        """Bytes of all files of the chain."""
        of_dense = self.dense.bytes if self.dense is not None else 0
        return of_dense + sum(file.bytes for link in self.links for file in link.files)


def generation_after(manifest: Manifest | None) -> str:
    """A name for the save that follows this one; no other save has it."""
    number = 1 if manifest is None else int(manifest.generation[1:].partition("-")[0]) + 1
    return f"g{number:06}-{secrets.token_hex(4)}"


def checksum(body: dict[str, Any]) -> str:
    """What stands under "checksum" beside `body`."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"crc32c:{crc32c(text.encode()):08x}"


def to_bytes(manifest: Manifest) -> bytes:
    """The file."""
    links = (manifest, *manifest.before)
    # What an older sok would understand, it shall read.
    placements = (placed.members_of(table.placement)[0] for link in links for table in link.tables)
    version = max([2 if manifest.before else 1, *placements])
    members = _link_members(manifest)
    members["optimizers"] = [
        {name: value for name, value in vars(optimizer).items() if name != "source" or value is not None}
        for optimizer in manifest.optimizers
    ]
    del members["before"], members["dense"]
    if manifest.dense is not None:
        members["dense"] = {**vars(manifest.dense), "variables": list(manifest.dense.variables)}
    if version > 1:
        members["before"] = [_link_members(link) for link in manifest.before]
    body = {"format": FORMAT, "version": version, **members}
    return (json.dumps({**body, "checksum": checksum(body)}) + "\n").encode()


def _link_members(link: Link | Manifest) -> dict[str, Any]:
    members = {**vars(link), "tables": [_table_members(table) for table in link.tables]}
    if link.same_as is None:
        del members["same_as"]
    return members


def _table_members(table: SavedTable) -> dict[str, Any]:
    files = [{name: value for name, value in vars(file).items() if _is_said(file, name)} for file in table.files]
    members = {**vars(table), "slot_sets": [vars(slot_set) for slot_set in table.slot_sets], "files": files}
    del members["placement"]
    if table.step is None:
        del members["step"]
    return {**members, **placed.members_of(table.placement)[1]}


def _placement(body: dict[str, Any], where: str, hashed: bool, world_size: int, dim: int) -> Placement:
    owner, said = _member(body, "owner", _KINDS["int | None"], where), body.get("placement")
    try:
        found = placed.from_members(owner, said)
        found.check(world_size, hashed, dim)
    except (TypeError, ValueError) as error:
        raise _Wrong(f"{where} is placed by {said!r}: {error}") from None
    return found


def _is_said(file: ShardFile, name: str) -> bool:
    return file.held is not None or name not in ("erased", "held")


def write_manifest(folder: PathLike, manifest: Manifest, check: Callable[[], None] = lambda: None) -> None:
    """Puts the manifest into place, at once: before, the folder is the old checkpoint, after it the new one.

    `check` is called at the last moment, when nothing is left to do but the rename.
    """
    final = os.path.join(folder, NAME)
    partial = f"{final}.{manifest.generation}.tmp"
    try:
        with open(partial, "wb") as file:
            file.write(to_bytes(manifest))
            file.flush()
            os.fsync(file.fileno())
        check()
        os.rename(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(folder)


def sync_folder(folder: PathLike) -> None:
    """Waits until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders and need not be asked to.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(path: PathLike) -> None:
    """Makes a folder with all above it that are missing, and waits until the disk has each one's name."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with contextlib.suppress(FileExistsError):  # another process was first; what is no folder shows when it is used
        os.mkdir(path)
    sync_folder(parent)


def read_manifest(path: PathLike) -> Manifest:
    """Returns what the checkpoint in folder `path` says of itself, checked; its shards are not looked at.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the manifest is damaged, of another format, or of a newer version. A ValueError.

    Example:
        >>> import sok, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save(folder, [sok.EmbeddingVariable(dim=2, capacity=10, name="listed")])
        ...     read_manifest(folder).table("listed").dim
        2
    """
    return from_bytes(read_bytes(path), os.path.join(path, NAME))


def read_bytes(path: PathLike) -> bytes:
    """The manifest's file in folder `path`, as it is.

    Raises:
        as `read_manifest`, for what is no file, or none that small.
    """
    file = Path(path) / NAME
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{file}: not a file.")
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path}: no checkpoint here: there is no {NAME}. A save that was interrupted leaves none."
        ) from None
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(file)) from None  # reading names no file
    if len(data) > _MAX_BYTES:
        raise CheckpointError(f"{file}: more than {_MAX_BYTES} bytes cannot be a manifest.")
    return data


def stamp(path: PathLike) -> tuple[int, ...] | None:
    """What tells one manifest in folder `path` from the next, without reading it; None if there is none."""
    try:
        # Opened, not only asked for: network file systems look again then, and else remember for up to a minute.
        descriptor = os.open(os.path.join(path, NAME), os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=4)  # a save looks several times at the same one
def from_bytes(data: bytes, file: str) -> Manifest:
    """The manifest in `data`, checked. `file` is for messages."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        at = getattr(error, "pos", None)
        raise CheckpointError(f"{file}: at offset {at or 0}: not JSON ({error}).") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{file}: not the manifest of a sok checkpoint.")
    version = body.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{file}: written in version {version} of the format; this sok reads up to version {VERSION}. "
            "Use a newer sok."
        )
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file}: no version of the format is {version!r}.")
    found = body.pop("checksum", None)
    if found != checksum(body):
        raise CheckpointError(f"{file}: wrong checksum: the manifest was changed. Found {found!r}.")
    try:
        manifest = _manifest(body)
    except _Wrong as wrong:
        raise CheckpointError(f"{file}: {wrong}.") from None
    return manifest


class _Wrong(Exception):
    pass


def _member(body: Any, name: str, kinds: Any, where: str) -> Any:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(body, dict) or name not in body:
        raise _Wrong(f"{where} has no {name!r}")
    value = body[name]
    if type(value) not in kinds:
        raise _Wrong(f"{name!r} of {where} is {value!r}")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise _Wrong(f"{name!r} of {where} is not a number of 64 bits: {value}")
    if type(value) is int and name != "seed" and value < 0:
        raise _Wrong(f"{name!r} of {where} is negative: {value}")
    return value


# What JSON may have for a field of the classes above, by its annotation. Fields of other kinds are read one by one.
_KINDS: dict[str, Any] = {"str": str, "int": int, "bool": bool, "dict[str, Any]": dict}
_KINDS |= {"int | None": (int, type(None)), "float | None": (float, type(None))}


def _members(kind: type, body: Any, where: str) -> dict[str, Any]:
    """The fields of `kind` that have no default."""
    required = [f for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    return {f.name: _member(body, f.name, _KINDS[f.type], where) for f in required if f.type in _KINDS}


def _manifest(body: dict[str, Any]) -> Manifest:
    before = _member(body, "before", list, "the manifest") if body["version"] > 1 else []
    if body["version"] == 1 and "before" in body:
        raise _Wrong("a chain of deltas in version 1")
    older = tuple(_link(link, f"link {i} of the chain", is_delta=i > 0) for i, link in enumerate(before))
    newest = _link(body, "the manifest", is_delta=bool(older))
    _check_chain((*older, newest))
    found = _member(body, "optimizers", list, "the manifest")
    optimizers = tuple(_optimizer(state, "an optimizer") for state in found)
    dense = _dense(body["dense"], newest.generation) if "dense" in body else None
    return Manifest(**vars(newest), optimizers=optimizers, before=older, dense=dense)


def _dense(body: Any, generation: str) -> DenseFiles:
    where = "the dense weights"
    names = _member(body, "variables", list, where)
    if not all(isinstance(name, str) for name in names):
        raise _Wrong(f"{where} have names that are none: {names!r}")
    name = _member(body, "name", str, where)
    if name != f"{generation}-dense":  # so none leads out of the folder
        raise _Wrong(f"{where} have the name {name!r}, which no save gives")
    return DenseFiles(name, tuple(names), _member(body, "bytes", int, where))


def _optimizer(body: Any, where: str) -> OptimizerState:
    members = _members(OptimizerState, body, where)
    source = _member(body, "source", str, where) if "source" in body else None
    return OptimizerState(**members, source=source)


def _link(body: Any, where: str, is_delta: bool) -> Link:
    plain = _members(Link, body, where)
    same_as = _member(body, "same_as", str, where) if "same_as" in body else None
    for generation in (plain["generation"], same_as):
        if generation is not None and GENERATION.fullmatch(generation) is None:
            raise _Wrong(f"no save gives the generation {generation!r}")
    tables = tuple(_table(t, plain, is_delta) for t in _member(body, "tables", list, where))
    names = [table.name for table in tables]
    if len(set(names)) != len(names):
        raise _Wrong("two tables have one name")
    return Link(**plain, tables=tables, same_as=same_as)


def _check_chain(links: tuple[Link, ...]) -> None:
    if len({link.generation for link in links}) != len(links):
        raise _Wrong("a save comes twice in the chain")
    shapes = [{(t.name, t.dim, t.key_dtype) for t in link.tables} for link in links]
    if any(shape != shapes[0] for shape in shapes):
        raise _Wrong("the saves of the chain have different tables")


def _table(body: Any, link: dict[str, Any], is_delta: bool) -> SavedTable:
    name = _member(body, "name", str, "a table")
    where = f"table {name!r}"
    plain = _members(SavedTable, body, where)
    found = _member(body, "slot_sets", list, where)
    slot_sets = tuple(SavedSlotSet(**_members(SavedSlotSet, s, f"a slot set of {where}")) for s in found)
    files = tuple(_shard(f, where, link, is_delta) for f in _member(body, "files", list, where))
    if len({file.rank for file in files}) != len(files):
        raise _Wrong(f"{where} has two files of one rank")
    placement = _placement(body, where, plain["hashed"], link["world_size"], plain["dim"])
    # No longer list than that of the files: a damaged manifest may speak of any number of workers.
    if sorted(file.rank for file in files) != placement.writers(link["world_size"], len(files) + 1):
        raise _Wrong(f"{where} has files of ranks {[file.rank for file in files]}, not of all that have held rows")
    step = _member(body, "step", int, where) if "step" in body else None
    return SavedTable(**plain, placement=placement, slot_sets=slot_sets, files=files, step=step)


def _shard(body: Any, where: str, link: dict[str, Any], is_delta: bool) -> ShardFile:
    of = f"a file of {where}"
    counts = {name: _member(body, name, int, of) for name in ("erased", "held") if is_delta}
    shard = ShardFile(**_members(ShardFile, body, of), **counts)
    match = SHARD_NAME.fullmatch(shard.name)
    # So no name leads out of the folder.
    if match is None or match[1] != link["generation"]:
        raise _Wrong(f"{where} has a file with the name {shard.name!r}, which no save gives")
    if shard.rank >= link["world_size"]:
        raise _Wrong(f"{where} has a file of rank {shard.rank}, of {link['world_size']} ranks")
    return shard
