"""A table with histories, admission and eviction, as Python dicts: `sok.Admission`, `sok.Eviction`, `table.history`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from tests.reference import optimizers
from tests.reference.initial_values import Initializer, initial_row
from tests.reference.keys import word
from tests.reference.placement import bucket

MOST = 2**32 - 1
"""Where counts stop."""
_ADMIT = 0x61646D6974
_WORD = 2**64 - 1


def hash_key(x: int) -> int:
    """`HashKey` of include/sok/hash_key.h."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def is_drawn(key: int, seed: int, probability: float) -> bool:
    """Whether `Admission(probability=...)` admits a key: for ever, whatever else happens."""
    threshold = math.ceil(Fraction(probability) * 2**64)
    return hash_key(word(key) ^ hash_key(word(seed) ^ _ADMIT)) < threshold


@dataclass
class Row:
    """A row, what an optimizer keeps of it, and its history."""

    values: np.ndarray  # [D] float64
    m: np.ndarray
    v: np.ndarray
    count: int = 0
    last: int = 0  # 1 + the step of its last occurrence; 0: none


@dataclass
class PolicyTable:
    """One table of one worker. Every method is what all shards together do for the concatenated batch."""

    dim: int
    seed: int = 0
    init: Initializer = Initializer()
    after: int | None = None
    probability: float | None = None
    older_than: int | None = None
    norm_below: float | None = None
    every: int | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    candidates: dict[int, list[int]] = field(default_factory=dict)  # count, last
    step: int = 0
    made: int = 0
    refused: int = 0
    evicted: int = 0

    @property
    def has_histories(self) -> bool:
        return any(policy is not None for policy in (self.after, self.probability, self.older_than, self.norm_below))

    def fresh(self, key: int) -> np.ndarray:
        return initial_row(self.init, self.seed, key, self.dim)

    def read(self, keys: Iterable[int]) -> np.ndarray:
        """What a lookup finds: [n, D]. A key without a row reads its initial row."""
        found = [self.rows[key].values if key in self.rows else self.fresh(key) for key in map(int, keys)]
        return np.array(found, np.float64).reshape(len(found), self.dim)

    def look_up(self, keys: Iterable[int]) -> np.ndarray:
        """A training lookup: counts, admits, and then reads. Repeats of a refused key count as refused each."""
        keys = [int(key) for key in keys]
        for key in dict.fromkeys(keys):
            self._occur(key)
        self.refused += sum(key not in self.rows for key in keys)
        return self.read(keys)

    def _occur(self, key: int) -> None:
        now = self.step + 1
        row = self.rows.get(key)
        if row is not None:
            if row.last != now:
                row.count, row.last = min(row.count + 1, MOST), now
            return
        if self.probability is not None and not is_drawn(key, self.seed, self.probability):
            return
        count, last = self.candidates.get(key, [0, 0])
        if last != now:
            count = min(count + 1, MOST)
        if self.after is None or count >= self.after:
            self.candidates.pop(key, None)
            self._make(key)
            self.rows[key].count, self.rows[key].last = count, now
        else:
            self.candidates[key] = [count, now]

    def _make(self, key: int) -> Row:
        zeros = np.zeros(self.dim)
        self.rows[key] = Row(self.fresh(key).astype(np.float64), zeros, zeros)
        self.made += 1
        return self.rows[key]

    def update(self, rule: str, gradients: dict[int, np.ndarray], rate: float = 0.1, exact_step: int = 0) -> None:
        """An update call. `gradients`: of keys that had a row when they were looked up; others have none to go to."""
        for key, row in self.rows.items():
            gradient = np.asarray(gradients.get(key, np.zeros(self.dim)), np.float64)
            if rule == "sgd":
                row.values = optimizers.sgd(row.values, gradient, rate)
            else:  # exact: a row without a gradient moves, too
                row.values, row.m, row.v = optimizers.adam(
                    row.values, row.m, row.v, gradient, rate, 0.9, 0.999, 1e-7, exact_step
                )
        self.step += 1
        if self.every is not None and self.step % self.every == 0:
            self._evict()

    def _evict(self) -> None:
        for row in self.rows.values():
            row.last = row.last or self.step
        gone = [key for key, row in self.rows.items() if self._leaves(row)]
        for key in gone:
            del self.rows[key]
        self.evicted += len(gone)
        if self.older_than is not None:
            self.candidates = {k: c for k, c in self.candidates.items() if self.step - c[1] < self.older_than}

    def _leaves(self, row: Row) -> bool:
        is_old = self.older_than is not None and self.step - row.last >= self.older_than
        return is_old or (self.norm_below is not None and float(np.sqrt(np.sum(row.values**2))) < self.norm_below)

    def assign(self, keys: Iterable[int], values: Sequence[np.ndarray]) -> None:
        """Gives rows whatever the count; of a candidate the history goes on."""
        for key, value in zip(map(int, keys), values, strict=True):
            row = self.rows.get(key)
            if row is None:
                count, last = self.candidates.pop(key, [0, 0])
                row = self._make(key)
                row.count, row.last = count, last
            row.values = np.array(value, np.float64)

    def erase(self, keys: Iterable[int]) -> int:
        """Removes row, history and candidate. How many rows."""
        for key in map(int, keys):
            self.candidates.pop(key, None)
        return sum(self.rows.pop(int(key), None) is not None for key in keys)

    def history(self, keys: Iterable[int]) -> tuple[list[int], list[int]]:
        """Counts and last steps."""
        rows, waiting = self.rows, self.candidates
        found = [(rows[k].count, rows[k].last) if k in rows else tuple(waiting.get(k, (0, 0))) for k in map(int, keys)]
        return [count for count, _ in found], [last for _, last in found]

    def stats(self) -> dict[str, int]:
        return {
            "rows": len(self.rows),
            "candidates": len(self.candidates),
            "made": self.made,
            "refused": self.refused,
            "evicted": self.evicted,
        }


def left_of(
    keys: np.ndarray,
    counts: np.ndarray,
    lasts: np.ndarray,
    now: int,
    max_rows: int,
    half_life: int | None,
    recent: bool,
) -> set[int]:
    """The keys [n] of rows that a pass with `max_rows` leaves, of those that others would leave."""
    age = (now - lasts) / half_life if half_life else 0.0
    scores = lasts if recent else np.log2(counts) - age
    buckets: dict[int, list[tuple[float, int, int]]] = {}
    for key, score in zip(keys.tolist(), scores.tolist(), strict=True):
        buckets.setdefault(bucket(key), []).append((score, hash_key(word(key)), key))
    left: set[int] = set()
    for number, rows in buckets.items():
        most = max_rows * (number + 1) // 4096 - max_rows * number // 4096
        left |= {key for _, _, key in sorted(rows)[-most:]}
    return left


class BloomFilter:
    """Counts keys as `Admission(after=..., bloom=...)` does: cells by bucket, a step at a time."""

    def __init__(self, keys: int, rate: float) -> None:
        self.cells = 4 * math.ceil(-keys * math.log(rate) / math.log(2) ** 2 / 4096 / 4)
        self.hashes = max(1, round(-math.log2(rate)))
        self.counts: dict[tuple[int, int], int] = {}  # of what is not zero

    def places(self, key: int) -> set[tuple[int, int]]:
        """Bucket and cell, where the key is counted."""
        first, step = (hash_key(word(key) ^ mark) for mark in (0x626C6F6F6D31, 0x626C6F6F6D32))
        number = bucket(key)
        return {(number, ((first + i * (step | 1)) & _WORD) % self.cells) for i in range(self.hashes)}

    def count(self, key: int) -> int:
        """In how many steps before this one the key was counted, at least."""
        return min(self.counts.get(place, 0) for place in self.places(key))

    def end_step(self, refused: set[int]) -> None:
        """The keys that the step refused count once."""
        for key in refused:
            for place in self.places(key):
                self.counts[place] = min(255, self.counts.get(place, 0) + 1)


@dataclass
class FullTable:
    """Whose rows leave when the table is full: `Eviction.least_recent`, `least_frequent`."""

    max_rows: int
    frequent: bool = False
    half_life: int | None = None
    protect: frozenset[int] = frozenset()
    seen: dict[int, list[int]] = field(default_factory=dict)  # count, last
    evicted: list[int] = field(default_factory=list)

    def train(self, keys: np.ndarray, now: int) -> set[int]:
        """A step, the `now`-th, whose batches hold these. The keys that leave at its end."""
        for key in set(keys.tolist()):
            self.seen[key] = [self.seen.get(key, [0])[0] + 1, now]
        buckets: dict[int, list[int]] = {}
        for key in self.seen:
            buckets.setdefault(bucket(key), []).append(key)
        gone: set[int] = set()
        for number, held in buckets.items():
            part = self.max_rows * (number + 1) // 4096 - self.max_rows * number // 4096
            if len(held) > part:
                order = sorted((self._score(key, now), hash_key(word(key)), key) for key in held)
                may_go = [key for _, _, key in order if key not in self.protect]
                gone |= set(may_go[: len(held) - (part - part // 16)])
        for key in gone:
            del self.seen[key]
        self.evicted += sorted(gone)
        return gone

    def _score(self, key: int, now: int) -> float:
        count, last = self.seen[key]
        if not self.frequent:
            return last
        return math.log2(count) - ((now - last) / self.half_life if self.half_life else 0.0)


def shared_row(key: int, shared_rows: int) -> tuple[int, int]:
    """Which of the shared rows is a key's: its bucket, and a number in it."""
    return bucket(key), hash_key(word(key) ^ 0x736861726564) % (shared_rows // 4096)


@dataclass
class SharingTable:
    """`Admission(after=..., shared_rows=...)` by plain gradient descent: rows of one number each."""

    after: int
    shared_rows: int
    initial: float
    own: dict[int, float] = field(default_factory=dict)
    shared: dict[tuple[int, int], float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def read(self, key: int) -> float:
        return self.own.get(key, self.shared.get(shared_row(key, self.shared_rows), self.initial))

    def train(self, keys: np.ndarray, gradient: float) -> list[float]:
        """One step with the same gradient for each place; what it has read."""
        for key in dict.fromkeys(keys.tolist()):
            self.counts[key] = self.counts.get(key, 0) + 1
            if self.counts[key] == self.after:
                self.own[key] = self.read(key)
            if key not in self.own:
                self.shared.setdefault(shared_row(key, self.shared_rows), self.initial)
        found = [self.read(key) for key in keys.tolist()]
        for key in keys.tolist():
            if key in self.own:
                self.own[key] -= gradient
            else:
                self.shared[shared_row(key, self.shared_rows)] -= gradient
        return found
