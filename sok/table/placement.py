"""Which rank holds the row of a key: `row_wise` and `table_wise`. Knows no TensorFlow.

Its twin in C++ is include/sok/partition.h.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

BUCKET_BITS = 12
NUM_BUCKETS = 2**BUCKET_BITS
"""Of rows that are spread by hash. A bucket is on one rank at any world size, whole."""

HASH_NAME = "fmix64"
"""What files call the hash."""

_BY_KEY, _BY_HASH = -1, -2  # what native code is told in the place of an owner


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rank holds the rows of a table. Made by `sok.row_wise` and `sok.table_wise`.

    Args:
        hash: spread rows by a hash of their keys, not by the keys themselves.
        owner: the rank that holds all rows; None: they are spread over all ranks.

    Raises:
        ValueError: `owner` is no rank, or is given together with `hash`.

    Example:
        >>> Placement(), Placement(hash=True), Placement(owner=1)
        (row_wise(), row_wise(hash=True), table_wise(1))
        >>> Placement().owner_of(np.array([4, -1]), world_size=3).tolist()
        [1, 2]
    """

    hash: bool = False
    owner: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.hash, bool):
            raise ValueError(f"`hash` must be True or False. Received: {self.hash!r}.")
        if self.owner is None:
            return
        if isinstance(self.owner, bool) or not hasattr(self.owner, "__index__") or self.owner < 0:
            raise ValueError(f"`owner` must be None or a rank in [0, workers). Received: {self.owner!r}.")
        if self.hash:
            raise ValueError("The rows of a table are on one rank (`owner`) or spread by hash (`hash=True`), not both.")
        object.__setattr__(self, "owner", int(self.owner))

    def __repr__(self) -> str:
        return (
            f"table_wise({self.owner})" if self.owner is not None else f"row_wise({'hash=True' if self.hash else ''})"
        )

    def check(self, world_size: int | None, hashed: bool) -> None:
        """Raises `ValueError` if a table cannot be placed so on `world_size` ranks (None: not known yet)."""
        if self.hash and not hashed:
            raise ValueError(
                "`placement` must be row_wise() or table_wise(owner) for a table whose keys are row numbers: spread by "
                "hash, shards of one capacity have no room for them. Make it with hashed=True (a feature column: with "
                "`capacity`), or leave hash out."
            )
        if world_size is None:
            return
        if self.owner is not None and self.owner >= world_size:
            raise ValueError(
                f"`owner` must be None or a rank in [0, {world_size}), the workers of this job. Received: {self.owner}."
            )
        if self.hash and world_size > NUM_BUCKETS:
            raise ValueError(f"row_wise(hash=True) has {NUM_BUCKETS} buckets, and this job {world_size} workers.")

    def num_shards(self, world_size: int) -> int:
        """How many ranks hold rows."""
        return world_size if self.owner is None else 1

    def owner_of(self, keys: np.ndarray, world_size: int) -> np.ndarray:
        """The rank of each key: [n] int64. keys: [n], of any integer dtype."""
        if self.owner is not None:
            return np.full(len(keys), self.owner)
        if self.hash:
            return (buckets_of(keys) * world_size) >> BUCKET_BITS
        if keys.dtype.kind == "u":
            return (keys.astype(np.uint64) % np.uint64(world_size)).astype(np.int64)
        return keys.astype(np.int64) % world_size

    def local_keys(self, num_keys: int, rank: int, world_size: int) -> tuple[int, int, int]:
        """Start, stop and step of the row numbers below `num_keys` that a rank holds, of a table that is not hashed."""
        if self.owner is None:
            return rank, max(rank, num_keys), world_size
        return 0, num_keys if rank == self.owner else 0, 1

    def row_of(self, keys: Any, world_size: int) -> Any:
        """The place of each key among its rank's rows, of a table that is not hashed."""
        return keys // self.num_shards(world_size)

    def holds(self, rank: int) -> bool:
        """Whether a rank holds rows at all."""
        return self.owner in (None, rank)

    def may_hold(self, rank: int, world_size: int, saved: Placement, saved_rank: int, saved_size: int) -> bool:
        """Whether a key of `rank` here may have been one of `saved_rank` where a table was placed as `saved`."""
        if not (self.holds(rank) and saved.holds(saved_rank)):
            return False
        if self.owner is not None or saved.owner is not None or self.hash != saved.hash:
            return True
        if self.hash:
            first, stop = _buckets_on(rank, world_size)
            saved_first, saved_stop = _buckets_on(saved_rank, saved_size)
            return max(first, saved_first) < min(stop, saved_stop)
        # Both leave the same remainder by what divides both sizes.
        common = math.gcd(saved_size, world_size)
        return saved_rank % common == rank % common

    def to_attributes(self) -> dict[str, int]:
        """The attributes by which native ops know it."""
        return {"owner": (_BY_HASH if self.hash else _BY_KEY) if self.owner is None else self.owner}

    @classmethod
    def from_attributes(cls, owner: int) -> Placement:
        """The placement that native code means by `owner`."""
        return cls(hash=owner == _BY_HASH, owner=owner if owner >= 0 else None)

    def get_config(self) -> dict[str, Any]:
        """The arguments of which `from_config` makes an equal one."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Placement:
        """The placement of which `get_config` gave this."""
        return cls(**config)


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
    return Placement(hash=hash)


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
    return Placement(owner=owner)


def buckets_of(keys: np.ndarray) -> np.ndarray:
    """The bucket of each key, [n] int64 in [0, 4096). Files rely on it: it never changes.

    Source: the finaliser of MurmurHash3 (Appleby, 2011).
    """
    with np.errstate(over="ignore"):
        words = keys.astype(np.uint64 if keys.dtype.kind == "u" else np.int64).view(np.uint64)
        words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        return ((words ^ (words >> np.uint64(33))) >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def _buckets_on(rank: int, world_size: int) -> tuple[int, int]:
    """The first bucket of a rank, and that after its last."""
    return -(-rank * NUM_BUCKETS // world_size), -(-(rank + 1) * NUM_BUCKETS // world_size)
