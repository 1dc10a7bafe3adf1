"""Which rank holds which part of the row of a key. Knows no TensorFlow.

A kind of placement is one class here (or anywhere: `Placement` tells how), and functions that make it. All other code
asks `Placement`. Native code knows what kinds have in common: include/sok/partition.h.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

BUCKET_BITS = 12
NUM_BUCKETS = 2**BUCKET_BITS
"""Of rows that are spread by hash. A bucket is on one rank at any world size, whole."""

HASH_NAME = "fmix64"
"""What files call the hash."""

_RANK_BITS = 14  # of what native ops know of other kinds than these: OwnerOfRanks of include/sok/partition.h
_MAX_RANKS = 2**_RANK_BITS

_KINDS: dict[str, type[Placement]] = {}


@dataclasses.dataclass(frozen=True)
class Part:
    """Some columns of the rows of a table, as native ops know them: a table of its own, on every rank."""

    columns: range
    ranks: range  # that hold rows of it
    attributes: dict[str, int]
    copy_of: int = -1  # the rank whose copy of all rows it is; -1: it is no copy

    @property
    def dim(self) -> int:
        """Columns."""
        return len(self.columns)


class Placement:
    """Which rank holds the rows of a table. Made by `sok.row_wise`, `table_wise`, `table_row_wise`, `column_wise`, ...

    A new kind is a frozen dataclass, a subclass with a name (`class Upper(Placement, kind="upper")`), whose fields are
    its arguments and whose `ranks` says which ranks hold rows. Its name and its fields are in files and configurations.

    Example:
        >>> row_wise(), row_wise(hash=True), table_wise(1)
        (row_wise(), row_wise(hash=True), table_wise(1))
        >>> row_wise().owner_of(np.array([4, -1]), world_size=3).tolist()
        [1, 2]
    """

    kind: ClassVar[str]
    owner: ClassVar[int | None] = None
    """The rank that holds all rows, at any world size; None: there is none."""
    hash: ClassVar[bool] = False
    """Whether rows are spread by a hash of their keys, not by the keys themselves."""
    cuts_rows: ClassVar[bool] = False
    """Whether a row lies on several ranks, each of which has some of its columns."""
    is_copied: ClassVar[bool] = False
    """Whether each rank that holds rows holds all of them."""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind
        if kind:
            _KINDS[kind] = cls

    def ranks(self, world_size: int) -> range:
        """The ranks that hold rows, one after the other. What `check` allows is not empty."""
        raise NotImplementedError

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        shown = [f"{f.name}={v!r}" for f in fields if (v := getattr(self, f.name)) != f.default]
        return f"{self.kind}({', '.join(shown)})"

    @property
    def words(self) -> str:
        """How lists of tables say it; of the usual placement nothing."""
        return repr(self)

    def check(self, world_size: int | None, hashed: bool, dim: int | None = None) -> None:
        """Raises `ValueError` if a table of rows of `dim` cannot be placed so on so many ranks. None: not known yet."""
        if self.hash and not hashed:
            raise ValueError(
                "`placement` must be row_wise() or table_wise(owner) for a table whose keys are row numbers: spread by "
                "hash, shards of one capacity have no room for them. Make it with hashed=True (a feature column: with "
                "`capacity`), or leave hash out."
            )
        if world_size is None:
            return
        ranks = self.ranks(world_size)
        if not ranks or ranks[-1] >= world_size:
            raise ValueError(
                f"`owner` must be None or a rank in [0, {world_size}), the workers of this job. Received: {self.owner}."
                if self.owner is not None
                else f"{self} must have rows on some of the {world_size} workers of this job. It has: {ranks}."
            )
        if self.hash and len(ranks) > NUM_BUCKETS:
            raise ValueError(f"{self} has {NUM_BUCKETS} buckets, and this job {len(ranks)} workers.")

    def num_shards(self, world_size: int) -> int:
        """How many ranks hold rows."""
        return len(self.ranks(world_size))

    def share(self, num_keys: int, world_size: int) -> int:
        """How many of the row numbers below `num_keys` a rank holds at most, of a table that is not hashed."""
        return -(-num_keys // self.num_shards(world_size))

    def holds(self, rank: int, world_size: int) -> bool:
        """Whether a rank holds rows at all."""
        return rank in self.ranks(world_size)

    def parts(self, dim: int, world_size: int) -> tuple[Part, ...]:
        """What a table of rows of `dim` is made of in a job of that size. A rank holds rows of one part at most."""
        return (Part(range(dim), self.ranks(world_size), self.to_attributes(world_size)),)

    def part_of(self, rank: int, dim: int, world_size: int) -> Part:
        """The part of which a rank holds rows; one of which it holds none, if it holds no rows at all."""
        parts = self.parts(dim, world_size)
        return next((part for part in parts if rank in part.ranks), parts[0])

    def writers(self, world_size: int, most: int | None = None) -> list[int]:
        """The ranks whose rows, all together, are the table: those that write files. `most`: no more of them."""
        return list(self.ranks(world_size)[:most])

    def owner_of(self, keys: np.ndarray, world_size: int) -> np.ndarray:
        """The rank of each key: [n] int64. keys: [n], of any integer dtype. Of several holders the first."""
        ranks = self.ranks(world_size)
        if self.hash:
            return ranks.start + ((buckets_of(keys) * len(ranks)) >> BUCKET_BITS)
        if keys.dtype.kind == "u":
            return ranks.start + (keys.astype(np.uint64) % np.uint64(len(ranks))).astype(np.int64)
        return ranks.start + keys.astype(np.int64) % len(ranks)

    def holds_keys(self, keys: np.ndarray, rank: int, world_size: int) -> np.ndarray:
        """Whether a rank holds rows, or columns of rows, of each key: [n] bool."""
        return self.owner_of(keys, world_size) == rank

    def local_keys(self, num_keys: int, rank: int, world_size: int) -> tuple[int, int, int]:
        """Start, stop and step of the row numbers below `num_keys` that a rank holds, of a table that is not hashed."""
        ranks = self.ranks(world_size)
        if rank not in ranks:
            return 0, 0, 1
        return rank - ranks.start, max(rank - ranks.start, num_keys), len(ranks)

    def row_of(self, keys: Any, world_size: int) -> Any:
        """The place of each key among its rank's rows, of a table that is not hashed."""
        return keys // self.num_shards(world_size)

    def may_hold(self, rank: int, world_size: int, saved: Placement, saved_rank: int, saved_size: int) -> bool:
        """Whether a key of `rank` here may have been one of `saved_rank` where a table was placed as `saved`."""
        here, there = self.ranks(world_size), saved.ranks(saved_size)
        if not self.holds(rank, world_size) or saved_rank not in saved.writers(saved_size):
            return False
        if self.hash != saved.hash or any(one.cuts_rows or one.is_copied for one in (self, saved)):
            return True
        place, saved_place = rank - here.start, saved_rank - there.start
        if self.hash:
            first, stop = _buckets_on(place, len(here))
            saved_first, saved_stop = _buckets_on(saved_place, len(there))
            return max(first, saved_first) < min(stop, saved_stop)
        # Both leave the same remainder by what divides both numbers of ranks.
        common = math.gcd(len(here), len(there))
        return place % common == saved_place % common

    def attributes_of(self, rank: int, world_size: int) -> dict[str, int]:
        """The attributes by which native ops know the rows of a rank that is among `writers`."""
        return self.to_attributes(world_size)

    def to_attributes(self, world_size: int) -> dict[str, int]:
        """The attributes by which native ops know it, in a job of that size: `OwnerOfRanks` of partition.h."""
        ranks = self.ranks(world_size)
        if ranks.stop >= _MAX_RANKS or ranks.step != 1:
            raise ValueError(f"{self} must have ranks below {_MAX_RANKS:,} that follow one another. It has: {ranks}.")
        return {"owner": -3 - (((ranks.start << _RANK_BITS) + len(ranks)) * 2 + self.hash)}

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes an equal one of, for JSON."""
        return {"kind": self.kind, **{name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}}

    @staticmethod
    def from_config(config: dict[str, Any]) -> Placement:
        """The placement of which `get_config` gave this. Raises `ValueError` for a kind that is not known."""
        arguments = dict(config)
        kind = arguments.pop("kind", None)
        if kind is None and arguments.keys() == {"hash", "owner"}:  # before kinds had names
            owner = arguments["owner"]
            return row_wise(arguments["hash"]) if owner is None else table_wise(owner)
        if kind not in _KINDS:
            known = ", ".join(sorted(_KINDS))
            raise ValueError(
                f"no placement is of kind {kind!r}; known are {known}. Use a newer sok, or import its class"
            )
        return _KINDS[kind](**arguments)


@dataclasses.dataclass(frozen=True, repr=False)
class RowWise(Placement, kind="row_wise"):
    """Made by `row_wise`."""

    hash: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        if not isinstance(self.hash, bool):
            raise ValueError(f"`hash` must be True or False. Received: {self.hash!r}.")

    def ranks(self, world_size: int) -> range:
        return range(world_size)

    @property
    def words(self) -> str:
        return "spread by hash" if self.hash else ""

    def to_attributes(self, world_size: int) -> dict[str, int]:
        return {"owner": -2 if self.hash else -1}  # as files had it first


@dataclasses.dataclass(frozen=True, repr=False)
class TableWise(Placement, kind="table_wise"):
    """Made by `table_wise`."""

    owner: int  # type: ignore[misc]

    def __post_init__(self) -> None:
        if isinstance(self.owner, bool) or not hasattr(self.owner, "__index__") or self.owner < 0:
            raise ValueError(f"`owner` must be None or a rank in [0, workers). Received: {self.owner!r}.")
        object.__setattr__(self, "owner", int(self.owner))

    def __repr__(self) -> str:
        return f"table_wise({self.owner})"

    def ranks(self, world_size: int) -> range:
        return range(self.owner, self.owner + 1)

    @property
    def words(self) -> str:
        return f"all on rank {self.owner}"

    def to_attributes(self, world_size: int) -> dict[str, int]:
        return {"owner": self.owner}  # as files had it first


@dataclasses.dataclass(frozen=True, repr=False)
class TableRowWise(Placement, kind="table_row_wise"):
    """Made by `table_row_wise`."""

    host: int
    hosts: int
    hash: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", _whole("host", self.host, 0))
        object.__setattr__(self, "hosts", _whole("hosts", self.hosts))
        if self.host >= self.hosts:
            raise ValueError(f"`host` must be in [0, {self.hosts}), the hosts. Received: {self.host}.")
        if not isinstance(self.hash, bool):
            raise ValueError(f"`hash` must be True or False. Received: {self.hash!r}.")

    def ranks(self, world_size: int) -> range:
        return range(world_size * self.host // self.hosts, world_size * (self.host + 1) // self.hosts)


class _OfAllKeys(Placement):
    """Each rank that holds rows has rows, or columns of rows, of all keys."""

    def num_shards(self, world_size: int) -> int:
        return 1

    def owner_of(self, keys: np.ndarray, world_size: int) -> np.ndarray:
        return np.full(len(keys), self.writers(world_size)[0], np.int64)

    def holds_keys(self, keys: np.ndarray, rank: int, world_size: int) -> np.ndarray:
        return np.full(len(keys), self.holds(rank, world_size))

    def local_keys(self, num_keys: int, rank: int, world_size: int) -> tuple[int, int, int]:
        return 0, num_keys if self.holds(rank, world_size) else 0, 1

    def attributes_of(self, rank: int, world_size: int) -> dict[str, int]:
        return {"owner": rank}

    def to_attributes(self, world_size: int) -> dict[str, int]:
        raise ValueError(f"{self} has several owners of a key on {world_size} ranks: each of its parts has one.")


@dataclasses.dataclass(frozen=True, repr=False)
class ColumnWise(_OfAllKeys, kind="column_wise"):
    """Made by `column_wise`."""

    pieces: int | tuple[int, ...]
    owners: tuple[int, ...] | None = None
    cuts_rows = True

    def __post_init__(self) -> None:
        if isinstance(self.pieces, list | tuple):
            object.__setattr__(self, "pieces", tuple(_whole("pieces", width) for width in self.pieces))
        else:
            _whole("pieces", self.pieces)
        if self.owners is not None:
            object.__setattr__(self, "owners", tuple(_whole("owners", owner, 0) for owner in self.owners))
        if self.num_pieces < 1 or len(self.owners or ()) not in (0, self.num_pieces) or self.owners == ():
            raise ValueError(
                "`pieces` must be how many, or the width of each; and `owners` None or the rank of each. "
                f"Received: pieces={self.pieces!r}, owners={self.owners!r}."
            )

    @property
    def num_pieces(self) -> int:
        return self.pieces if isinstance(self.pieces, int) else len(self.pieces)

    def ranks(self, world_size: int) -> range:
        owners = self._owners(world_size)
        return range(min(owners), max(owners) + 1)  # not each of them: see `holds`

    def holds(self, rank: int, world_size: int) -> bool:
        return rank in self._owners(world_size)

    def writers(self, world_size: int, most: int | None = None) -> list[int]:
        return sorted(set(self._owners(world_size)))[:most]

    def check(self, world_size: int | None, hashed: bool, dim: int | None = None) -> None:
        if world_size is not None:
            beyond = max(self._owners(world_size))
            if beyond >= world_size:
                raise ValueError(
                    f"`owners` must be ranks in [0, {world_size}), the workers of this job. Received: {beyond}."
                )
        if dim is None:
            return
        if self.num_pieces > dim if isinstance(self.pieces, int) else sum(self.pieces) != dim:
            raise ValueError(f"`pieces` must cut rows of {dim} columns, each into some. Received: {self.pieces!r}.")

    def parts(self, dim: int, world_size: int) -> tuple[Part, ...]:
        widths: dict[int, int] = {}  # pieces of one rank are one: which columns those are is nobody's matter
        for owner, width in zip(self._owners(world_size), self._widths(dim), strict=True):
            widths[owner] = widths.get(owner, 0) + width
        found, first = [], 0
        for owner, width in widths.items():
            found.append(Part(range(first, first + width), range(owner, owner + 1), {"owner": owner}))
            first += width
        return tuple(found)

    def _owners(self, world_size: int) -> tuple[int, ...]:
        return self.owners or tuple(piece % world_size for piece in range(self.num_pieces))

    def _widths(self, dim: int) -> tuple[int, ...]:
        if not isinstance(self.pieces, int):
            return self.pieces
        width, wider = divmod(dim, self.pieces)
        return tuple(width + (piece < wider) for piece in range(self.pieces))


@dataclasses.dataclass(frozen=True, repr=False)
class DataParallel(_OfAllKeys, kind="data_parallel"):
    """Made by `data_parallel`."""

    is_copied = True

    def ranks(self, world_size: int) -> range:
        return range(world_size)

    def writers(self, world_size: int, most: int | None = None) -> list[int]:
        return [0]

    def parts(self, dim: int, world_size: int) -> tuple[Part, ...]:
        return tuple(Part(range(dim), range(rank, rank + 1), {"owner": rank}, rank) for rank in range(world_size))


def row_wise(hash: bool = False) -> Placement:
    """Spreads the rows of a table over all workers.

    Args:
        hash: False: the row of a key is on rank key % world_size. Ids with a pattern (all even, blocks) crowd on some
            ranks. True: it is on the rank of the key's bucket. A hash that never changes puts keys into 4,096 buckets,
            and bucket b of a job of n workers is on rank b * n >> 12. For hashed tables, on at most 4,096 workers.

    Returns:
        For `TableOptions(placement=...)`. Results do not depend on it.

    Example:
        >>> row_wise(hash=True)
        row_wise(hash=True)
    """
    return RowWise(hash)


def table_wise(owner: int) -> Placement:
    """Puts all rows of a table on one worker.

    Args:
        owner: its rank. `sok.balance_tables` chooses owners for many tables.

    Returns:
        For `TableOptions(placement=...)`. Results do not depend on it.

    Raises:
        ValueError: `owner` is no rank.

    Example:
        >>> table_wise(0)
        table_wise(0)
    """
    if owner is None:
        raise ValueError("`owner` must be a rank. Received: None.")
    return TableWise(owner)


def column_wise(pieces: int | Sequence[int], owners: Sequence[int] | None = None) -> Placement:
    """Cuts the rows of a table into pieces, some columns each, that lie on different workers.

    For tables of long rows with few keys, or with keys that crowd. A key goes once to each worker that has a piece.
    What needs a whole row refuses such a table: optimizers whose state is one number a row, constraints.

    Args:
        pieces: how many, at most as many as a row has columns: the first `dim % pieces` have one column more. Or the
            columns of each, which sum to the table's dim.
        owners: the rank of each piece; a rank may have several. None: piece i is on rank i % world_size.

    Returns:
        For `TableOptions(placement=...)`. Results do not depend on it.

    Raises:
        ValueError: no whole numbers, or not an owner for each piece.

    Example:
        >>> column_wise(2), column_wise([8, 4], owners=[1, 0])
        (column_wise(pieces=2), column_wise(pieces=(8, 4), owners=(1, 0)))
        >>> [(part.columns, part.ranks[0]) for part in column_wise(3, owners=[0, 1, 0]).parts(dim=8, world_size=2)]
        [(range(0, 5), 0), (range(5, 8), 1)]
    """
    return ColumnWise(pieces, owners)  # type: ignore[arg-type]


def table_row_wise(host: int, hosts: int, hash: bool = False) -> Placement:
    """Spreads the rows of a table over the workers of one host.

    For tables that are too much for one worker, where links within a host are faster than those between hosts: owners
    of a table, who answer together, share one. Workers are taken to be numbered host by host, as horovodrun does, as
    many on each: of R workers host h has those from R h / hosts to R (h + 1) / hosts.

    Args:
        host: which, in [0, hosts).
        hosts: how many.
        hash: as in `row_wise`.

    Returns:
        For `TableOptions(placement=...)`. Results do not depend on it.

    Raises:
        ValueError: `host` is none of them; when a table is made, that host has no worker.

    Example:
        >>> table_row_wise(1, hosts=2), list(table_row_wise(1, hosts=2).ranks(world_size=8))
        (table_row_wise(host=1, hosts=2), [4, 5, 6, 7])
    """
    return TableRowWise(host, hosts, hash)


def data_parallel() -> Placement:
    """Gives each worker a copy of all rows of a table.

    For small tables that every batch reads all over. All keys and gradients of a step go to all workers, in the
    collectives of the other tables, and each makes rows and updates them in the same order.

    Returns:
        For `TableOptions(placement=...)`. Results do not depend on it.

    Example:
        >>> data_parallel()
        data_parallel()
    """
    return DataParallel()


def buckets_of(keys: np.ndarray) -> np.ndarray:
    """The bucket of each key, [n] int64 in [0, 4096). Files rely on it: it never changes.

    Source: the finaliser of MurmurHash3 (Appleby, 2011).
    """
    with np.errstate(over="ignore"):
        words = keys.astype(np.uint64 if keys.dtype.kind == "u" else np.int64).view(np.uint64)
        words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        return ((words ^ (words >> np.uint64(33))) >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def _whole(argument: str, value: Any, low: int = 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < low:
        raise ValueError(f"`{argument}` must be whole numbers, at least {low}. Received: {value!r}.")
    return int(value)


def _buckets_on(rank: int, world_size: int) -> tuple[int, int]:
    """The first bucket of a rank, and that after its last."""
    return -(-rank * NUM_BUCKETS // world_size), -(-(rank + 1) * NUM_BUCKETS // world_size)
