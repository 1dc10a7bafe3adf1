"""When a key gets a row of its own, and when a row leaves: properties of a table. Knows no TensorFlow."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

from sok.table.placement import NUM_BUCKETS, Placement

HISTORY = "history"
"""The slot set in which rows with a policy keep what they have seen. Native code has the same names."""
HISTORY_RULE = "history(;count,last)"
CANDIDATES = "/sok.candidates"
"""What the name of a table is followed by in files that hold its keys that wait for a row."""

FILTER = "/sok.filter"
"""The same, for the Bloom filter that counts them."""

_MAX_COUNT = 2**32 - 1
_MAX_CELLS = 2**22
_LEAST_MAX_ROWS = 16 * NUM_BUCKETS
_MAX_SHARED = 4096 * NUM_BUCKETS
_MAX_PROTECTED = 2**16
_MAX_CAPACITY = 2**31  # of a table with a file


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Admission:
    """Says which keys get a row of their own. Give one of the two.

    A key without a row reads its initial row, if `shared_rows` or `unadmitted` do not say another thing, and gradients
    for it are dropped. What a table decides depends on the
    data and its seed alone: not on the number of workers, the placement or the schedule (docs/policies.md).

    Args:
        after: the step that is the `after`-th whose batch holds a key gives it its row, before that is read. 1 admits
            every key at once. A key that waits takes 24 to 32 bytes.
        bloom: (keys, rate), with `after` up to 255: counts in a Bloom filter for so many different keys, at least
            65,536, in place of each key by itself. It takes `-log(rate) / log(2)**2` bytes for each of `keys`: 10 at a
            rate of 1 %, the share of keys that get rows too early once so many are counted. It forgets nothing. Buckets
            of keys must be whole on their workers, as for `Eviction(max_rows=...)`.
        probability: the share of keys that get rows, in (0, 1]. A hash of the key and of the table's seed decides, once
            for all.
        shared_rows: how many rows keys share that have none of their own, a multiple of 4,096: by hashes, those of a
            bucket with each other. These learn; a key that is admitted begins with the row that it has shared, and its
            slots. None: its gradients are dropped. Keys of 64 bits; placement as `bloom`.
        unadmitted: without `shared_rows`: the number that all elements are which a key without a row reads, in training
            and outside. None: it reads its initial row.

    Raises:
        ValueError: neither or both are given, or one is out of range.

    Example:
        >>> import sok
        >>> import tensorflow as tf
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="admits", admission=sok.Admission(after=2))
        >>> optimizer = sok.optimizers.SGD(1.0)
        >>> for _ in range(2):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([7], tf.int64)))
        ...     optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        ...     print(table.stats()["rows"], table.stats()["candidates"])
        0 1
        1 0

    Source: the counter filter of DeepRec's EmbeddingVariable, and `filter_ratio` of SOK v2's hybrid tables.
    """

    after: int | None = None
    bloom: tuple[int, float] | None = None
    probability: float | None = None
    shared_rows: int | None = None
    unadmitted: float | None = None

    def __post_init__(self) -> None:
        if self.unadmitted is not None:
            if not (_is_number(self.unadmitted) and abs(self.unadmitted) <= 1e37):
                raise ValueError(f"`unadmitted` must be a number up to 1e37. Received: {self.unadmitted!r}.")
            if self.shared_rows is not None:
                raise ValueError("Give `unadmitted` or `shared_rows`: both say what keys without rows read.")
        if self.shared_rows is not None:
            check_whole("shared_rows", self.shared_rows, NUM_BUCKETS, _MAX_SHARED)
            if int(self.shared_rows) % NUM_BUCKETS:
                raise ValueError(f"`shared_rows` must be a multiple of {NUM_BUCKETS:,}. Received: {self.shared_rows}.")
        if self.bloom is not None:
            self._check_bloom(self.bloom)
        if (self.after is None) == (self.probability is None):
            raise ValueError(f"Give `after` or `probability`. Received: {self!r}.")
        if self.after is not None:
            check_whole("after", self.after, 1, _MAX_COUNT)
        if self.probability is not None and not (_is_number(self.probability) and 0.0 < self.probability <= 1.0):
            raise ValueError(f"`probability` must lie in (0, 1]. Received: {self.probability!r}.")

    def _check_bloom(self, bloom: Any) -> None:
        if not isinstance(bloom, (tuple, list)) or len(bloom) != 2:
            raise ValueError(f"`bloom` must be (keys, rate). Received: {bloom!r}.")
        keys, rate = bloom
        check_whole("bloom[0]", keys, _LEAST_MAX_ROWS, 2**40)
        if not (_is_number(rate) and 1e-9 <= rate <= 0.5):
            raise ValueError(f"`bloom[1]` must lie in [1e-9, 0.5]. Received: {rate!r}.")
        if self.after is None:
            raise ValueError("`bloom` goes with `after`. Received: after=None.")
        check_whole("after", self.after, 1, 255)
        object.__setattr__(self, "bloom", (int(keys), float(rate)))
        if self._cells() > _MAX_CELLS:
            raise ValueError(f"`bloom` would take more than {_MAX_CELLS * NUM_BUCKETS:,} bytes. Received: {bloom!r}.")

    def _cells(self) -> int:
        """Of each bucket's filter."""
        keys, rate = self.bloom or (0, 0.5)
        return 4 * math.ceil(-keys * math.log(rate) / math.log(2) ** 2 / NUM_BUCKETS / 4)

    @property
    def counts_apart(self) -> str:
        """What the table's name is followed by for what is counted of keys without rows; empty: nothing is."""
        return "" if self.after is None else CANDIDATES if self.bloom is None else FILTER

    def to_attributes(self) -> dict[str, Any]:
        """The attributes by which native ops know it."""
        constant = {
            "admit_reads_constant": self.unadmitted is not None,
            "admit_constant": float(self.unadmitted or 0.0),
        }
        return {"admit_shared_rows": int(self.shared_rows or 0), **constant, **self._when()}

    def _when(self) -> dict[str, Any]:
        if self.bloom is not None:
            hashes = max(1, round(-math.log2(self.bloom[1])))
            return {"admit_after": int(self.after or 1), "admit_cells": self._cells(), "admit_hashes": hashes}
        if self.after is not None:
            return {"admit_after": int(self.after)}
        below = min(2**64 - 1, math.ceil(math.ldexp(float(self.probability or 0.0), 64)))
        return {"admit_below": below - (below >= 2**63) * 2**64}  # as an attribute is stored, of 64 bits with a sign

    def get_config(self) -> dict[str, Any]:
        """What `Admission(**config)` makes it of again, for JSON."""
        return _said(self)

    def __repr__(self) -> str:
        return _shown(self)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Eviction:
    """Says when rows leave a table: any of the first three reasons is enough.

    `least_recent` and `least_frequent` make one that acts when the table is full. All others leave in passes over the
    table: after each update whose number (`table.step`) is a multiple of `every`. A
    key that has left starts anew when it comes again: from its initial row, and with `admission` from its first step.
    For incremental checkpoints, and those that follow them, it is erased.

    Args:
        older_than: in steps: rows leave, and keys that wait for a row are forgotten, that no batch has held in the last
            `older_than` steps.
        norm_below: rows leave whose weights have a smaller L2 norm. Rows must be whole on their workers: not with
            `sok.column_wise`.
        max_rows: of all workers together, at least 65,536: so many rows at most are left after a pass. Each of 4,096
            buckets of keys has its part of them and gives up what is over, though another may have room. Buckets must
            be whole on their workers: a placement by hash, on one worker, in columns or copies. Capacity must have room
            for what comes between two passes as well.
        keep: what stays of a crowded bucket: 'recent', the rows that batches have held last; 'frequent', those that
            most steps have held. A hash of the key decides between equal ones.
        half_life: of 'frequent': a row counts half for each so many steps since a batch held it last. None: in full.
        every: steps from one pass to the next, at least 1. A pass reads 8 bytes of each row, or its weights, and with
            `max_rows` takes 24 bytes a row meanwhile. None: an eighth of `older_than`, at least 1; without `older_than`
            it must be given.
        protect: keys whose rows never leave, at most 65,536. They count among the rows of their buckets.
        when_full, memory_bytes, slots: see `least_recent`, which says them.

    Raises:
        ValueError: nothing is given, or something is out of range.

    Example:
        >>> Eviction(older_than=1000)
        Eviction(older_than=1000, every=125)
        >>> Eviction(max_rows=1_000_000, keep="frequent", half_life=10_000, every=100)
        Eviction(max_rows=1000000, keep='frequent', half_life=10000, every=100)

    Source: DeepRec's GlobalStepEvict and L2WeightEvict, which look at rows when a checkpoint is saved; the eviction
    strategies of HierarchicalKV.
    """

    older_than: int | None = None
    norm_below: float | None = None
    max_rows: int | None = None
    keep: str = "recent"
    half_life: int | None = None
    every: int | None = None
    protect: tuple[int, ...] = ()
    when_full: bool = False
    memory_bytes: int | None = None
    slots: int = 0

    @classmethod
    def least_recent(
        cls, max_rows: int | None = None, *, memory_bytes: int | None = None, slots: int = 0, **more: Any
    ) -> Eviction:
        """Rows that batches have held longest ago leave when the table is full, at the end of the step that fills it.

        Each of 4,096 buckets of keys, by a hash, has its part of the rows. One with more than its part gives up rows
        until 15/16 of it are left. Within a step there is room for as many rows again as the table's capacity.

        Args:
            max_rows: of all workers together, at least 4,096. From 65,536 on buckets fill about evenly. None: the
                table's capacity on all workers.
            memory_bytes: instead: so many bytes of all workers together. They become rows once, when the table is made:
                a row of dim D takes `4 * D * (1 + slots) + 56`, D rounded up to 4.
            slots: how many vectors optimizers keep of a row: Adagrad 1, Adam 2. For `memory_bytes`.
            **more: `protect`, and `older_than`, `norm_below` and `every`, as `sok.Eviction` takes them.

        Raises:
            ValueError: an argument is out of range, or both are given.

        Example:
            >>> Eviction.least_recent(protect=[0])
            Eviction(protect=(0,), when_full=True)
            >>> Eviction.least_recent(memory_bytes=2**30, slots=1).max_rows_of(16, 10_000_000, 1)
            5835553

        Source: the eviction strategies kLru and kLfu of HierarchicalKV.
        """
        return cls(max_rows=max_rows, memory_bytes=memory_bytes, slots=slots, when_full=True, **more)

    @classmethod
    def least_frequent(
        cls,
        max_rows: int | None = None,
        *,
        half_life: int | None = None,
        memory_bytes: int | None = None,
        slots: int = 0,
        **more: Any,
    ) -> Eviction:
        """The same for the rows that the fewest steps have held; a hash of the key decides between equals.

        Args:
            max_rows, memory_bytes, slots, **more: see `least_recent`.
            half_life: a row counts half for each so many steps since a batch held it last. None: in full.

        Raises:
            ValueError: an argument is out of range, or both are given.

        Example:
            >>> Eviction.least_frequent(100_000, half_life=1000)
            Eviction(max_rows=100000, keep='frequent', half_life=1000, when_full=True)
        """
        budget: dict[str, Any] = {"max_rows": max_rows, "memory_bytes": memory_bytes, "slots": slots}
        return cls(keep="frequent", half_life=half_life, when_full=True, **budget, **more)

    def __post_init__(self) -> None:
        if self.older_than is None and self.norm_below is None and self.max_rows is None and not self.when_full:
            raise ValueError("Give `older_than`, `norm_below` or `max_rows`.")
        self._check_budget()
        object.__setattr__(self, "protect", _as_keys(self.protect))
        if self.keep not in ("recent", "frequent"):
            raise ValueError(f"`keep` must be 'recent' or 'frequent'. Received: {self.keep!r}.")
        if self.keep != "recent" and self.max_rows is None and not self.when_full:
            raise ValueError(f"`keep` says what stays of more than `max_rows`. Received: {self.keep!r} alone.")
        if self.half_life is not None:
            check_whole("half_life", self.half_life, 1, _MAX_COUNT)
            if self.keep != "frequent":
                raise ValueError(f"`half_life` is for keep='frequent'. Received: keep={self.keep!r}.")
        if self.older_than is not None:
            check_whole("older_than", self.older_than, 1, _MAX_COUNT)
        if self.norm_below is not None and not (_is_number(self.norm_below) and 1e-37 <= self.norm_below <= 1e37):
            raise ValueError(f"`norm_below` must be a number in [1e-37, 1e37]. Received: {self.norm_below!r}.")
        if self.every is None:
            if self.older_than is None and self.when_full and self.norm_below is None:
                return  # no pass
            if self.older_than is None:
                raise ValueError("`every` must be given without `older_than`: a pass looks at all rows.")
            object.__setattr__(self, "every", max(1, int(self.older_than) // 8))
        else:
            check_whole("every", self.every, 1, _MAX_COUNT)

    def _check_budget(self) -> None:
        if self.max_rows is not None:
            check_whole("max_rows", self.max_rows, NUM_BUCKETS if self.when_full else _LEAST_MAX_ROWS, 2**62)
        check_whole("slots", self.slots, 0, 64)
        if self.memory_bytes is None:
            return
        check_whole("memory_bytes", self.memory_bytes, 1, 2**62)
        if not self.when_full or self.max_rows is not None:
            raise ValueError(
                "`memory_bytes` is for sok.Eviction.least_recent and least_frequent, in place of `max_rows`. "
                f"Received: {self!r}."
            )

    def max_rows_of(self, dim: int, capacity: int, shards: int) -> int | None:
        """Rows of all workers of a table of this dim and capacity on so many shards. None: no bound.

        Raises:
            ValueError: they are too few.
        """
        if not self.when_full:
            return self.max_rows
        most = capacity * shards
        if self.max_rows is not None:
            most = min(most, int(self.max_rows))
        if self.memory_bytes is not None:
            stride = dim if dim < 4 else (dim + 3) // 4 * 4
            most = min(most, int(self.memory_bytes) // (4 * stride * (1 + int(self.slots)) + 56))
        if most < NUM_BUCKETS:
            raise ValueError(
                f"`eviction`: a table that gives up rows when it is full has room for {NUM_BUCKETS:,} rows on all "
                f"workers, one for each bucket of keys, or more. Here it has room for {most:,}: capacity {capacity:,} "
                f"on {shards} workers, {self!r}."
            )
        return most

    def room(self, capacity: int) -> int:
        """Rows that a shard of this capacity may have within a step."""
        return min(_MAX_CAPACITY, capacity + max(capacity, _LEAST_MAX_ROWS)) if self.when_full else capacity

    def to_attributes(self) -> dict[str, Any]:
        """The attributes by which native ops know it."""
        return {
            "evict_when_full": self.when_full,
            "evict_protect": [key - 2**64 if key >= 2**63 else key for key in self.protect],  # of 64 bits with a sign
            "evict_older_than": int(self.older_than or 0),
            "evict_norm_below": float(self.norm_below or 0.0),
            "evict_max_rows": int(self.max_rows or 0),
            "evict_keeps_frequent": self.keep == "frequent",
            "evict_half_life": int(self.half_life or 0),
            "evict_every": int(self.every or 1),
        }

    def get_config(self) -> dict[str, Any]:
        """What `Eviction(**config)` makes it of again, for JSON."""
        return _said(self)

    def __repr__(self) -> str:
        return _shown(self)


def counted_by(name: str) -> str | None:
    """The table that counts keys without rows in what files call `name`; None: that is a table as any other."""
    for ending in (CANDIDATES, FILTER):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return None


def _said(value: Admission | Eviction) -> dict[str, Any]:
    return {f.name: said for f in dataclasses.fields(value) if (said := getattr(value, f.name)) != f.default}


def _shown(value: Admission | Eviction) -> str:
    return f"{type(value).__name__}({', '.join(f'{name}={said!r}' for name, said in _said(value).items())})"


def as_admission(value: object) -> Admission | None:
    """A table's `admission`, given as such or as its config."""
    return _as(Admission, "admission", value)


def as_eviction(value: object) -> Eviction | None:
    """A table's `eviction`, given as such or as its config."""
    return _as(Eviction, "eviction", value)


def _as(kind: type[Any], argument: str, value: object) -> Any:
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        return kind(**value)
    raise ValueError(f"`{argument}` must be None or a sok.{kind.__name__}. Received: {value!r}.")


def check(
    admission: Admission | None, eviction: Eviction | None, hashed: bool, placement: Placement, key_dtype: str = "int64"
) -> None:
    """Raises `ValueError` where policies do not go with the table."""
    if admission is not None and not hashed:
        raise ValueError("`admission` is for hashed tables: of others every key has its place. Leave it out.")
    is_whole = placement.hash or placement.owner is not None or placement.is_copied
    if admission is not None and admission.bloom is not None and not is_whole:
        raise ValueError(
            f"`admission`: `bloom` counts by buckets of keys, and {placement!r} spreads these over workers. Use "
            "sok.row_wise(hash=True)."
        )
    if admission is not None and admission.shared_rows is not None:
        if not is_whole:
            raise ValueError(
                f"`admission`: `shared_rows` are those of buckets of keys, and {placement!r} spreads these over "
                "workers. Use sok.row_wise(hash=True)."
            )
        if not key_dtype.endswith("64"):
            raise ValueError(
                f"`admission`: `shared_rows` have keys of 64 bits. Received: key_dtype={key_dtype!r}. Use int64."
            )
    if eviction is not None and eviction.when_full and not hashed:
        raise ValueError("`eviction`: rows that leave when the table is full are for hashed tables. Leave it out.")
    if placement.cuts_rows and admission is not None and admission.after is not None:
        raise ValueError(
            f"`admission`: sok.Admission(after=...) counts whole rows, and {placement!r} cuts them. Use sok.row_wise()."
        )
    if placement.cuts_rows and eviction is not None and eviction.norm_below is not None:
        raise ValueError(f"`eviction`: `norm_below` needs whole rows, and {placement!r} cuts them. Use sok.row_wise().")

    by_bucket = eviction is not None and (eviction.max_rows is not None or eviction.when_full)
    if by_bucket and not (is_whole or placement.cuts_rows):
        raise ValueError(
            "`eviction`: with `max_rows`, or when the table is full, rows leave by buckets of keys, and "
            f"{placement!r} spreads these over workers. Use sok.row_wise(hash=True)."
        )


def _as_keys(protect: Any) -> tuple[int, ...]:
    if isinstance(protect, (str, bytes)) or not isinstance(protect, Iterable):
        raise ValueError(f"`protect` must be a list of keys. Received: {protect!r}.")
    keys = list(protect)
    for key in keys:
        check_whole("protect", key, -(2**63), 2**64 - 1)
    if len(keys) > _MAX_PROTECTED:
        raise ValueError(f"`protect` takes {_MAX_PROTECTED:,} keys at most. Received: {len(keys):,}.")
    return tuple(sorted({int(key) for key in keys}))


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_whole(argument: str, value: object, low: int, top: int) -> None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or not low <= int(value) <= top:
        raise ValueError(f"`{argument}` must be a whole number in [{low}, {top}]. Received: {value!r}.")
