"""The inputs: every contestant of a case gets the same keys, ids and gradients, made once from fixed seeds.

    keys                       [10M] distinct keys, all resident
    w1_{zipf,uniform}          [8, 1M] resident keys to look up
    w1_new_{zipf,uniform}      [12, 1M] nine in ten resident, the rest never seen before, shuffled
    w2_{zipf,uniform}_{b}      offsets [26, 4097] and ids of 26 tables x 1M rows, 1..10 ids for each of 4,096 samples
    w3_keys, w3_grads          [4, 1M] Zipf keys, [1M, 64] gradients

The big ones lie in files, for programs that are not Python; anything else (`make_bags`) is made where it is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ZIPF_EXPONENT = 1.05
DISTRIBUTIONS = ("zipf", "uniform")

W1_KEYS, W1_LOOKUPS, W1_BATCHES = 10_000_000, 1_000_000, 8
W1_NEW_STEPS, W1_NEW_SHARE = 12, 10  # one key in ten is new
W2_TABLES, W2_ROWS, W2_DIM, W2_BATCH, W2_HOTNESS, W2_BATCHES = 26, 1_000_000, 16, 4096, 10, 8
W3_KEYS, W3_DIM, W3_BATCHES = 1_000_000, 64, 4
W4_DENSE = 13


def data_dir() -> Path:
    """Where the files are: SOK_BENCH_DATA, or build/bench/data."""
    return Path(os.environ.get("SOK_BENCH_DATA") or ROOT / "build" / "bench" / "data")


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit words. Steele, Lea, Flood (2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def scattered_keys(first: int, last: int) -> np.ndarray:
    """Keys number first..last-1: distinct int64 all over the range."""
    with np.errstate(over="ignore"):
        return _mix(np.arange(first + 1, last + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def hashed_ids(ids: np.ndarray, table: int) -> np.ndarray:
    """Row numbers (below 2^40) of one table as scattered keys, for hashed tables: no two (table, id) give the same."""
    return _mix(ids.astype(np.uint64) + (np.uint64(table + 1) << np.uint64(40))).view(np.int64)


class Zipf:
    """Ranks 0..n-1 with probability proportional to (rank + 1) ** -exponent."""

    def __init__(self, n: int, exponent: float = ZIPF_EXPONENT) -> None:
        weights = np.arange(1, n + 1, dtype=np.float64) ** -exponent
        self._cumulative = np.cumsum(weights)
        self._cumulative /= self._cumulative[-1]

    def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        ranks = np.searchsorted(self._cumulative, rng.random(size))
        return np.minimum(ranks, len(self._cumulative) - 1)


def make_w1(data: Path) -> None:
    """Writes what W1 reads."""
    rng = np.random.default_rng(11)
    keys = scattered_keys(0, W1_KEYS)
    np.save(data / "keys.npy", keys)
    zipf = Zipf(W1_KEYS)
    # Rank r is key number r; numbers are hashed into keys, so frequent keys are nowhere near each other.
    draws = {
        "zipf": lambda size: keys[zipf.draw(rng, size)],
        "uniform": lambda size: keys[rng.integers(0, W1_KEYS, size)],
    }
    next_key, num_new = W1_KEYS, W1_LOOKUPS // W1_NEW_SHARE
    for name, draw in draws.items():
        np.save(data / f"w1_{name}.npy", np.stack([draw(W1_LOOKUPS) for _ in range(W1_BATCHES)]))
        steps = []
        for _ in range(W1_NEW_STEPS):
            step = np.concatenate([draw(W1_LOOKUPS - num_new), scattered_keys(next_key, next_key + num_new)])
            next_key += num_new
            rng.shuffle(step)
            steps.append(step)
        np.save(data / f"w1_new_{name}.npy", np.stack(steps))


@dataclasses.dataclass(frozen=True)
class Bags:
    """One batch of T tables: sample s of table t holds ids[base[t] + offsets[t, s]] up to the same of s + 1."""

    offsets: np.ndarray  # [T, B + 1] int64, each row from 0
    ids: np.ndarray  # int64, table after table
    base: np.ndarray  # [T + 1] int64

    @property
    def num_tables(self) -> int:
        return len(self.offsets)

    def table(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and row splits of one table."""
        return self.ids[self.base[t] : self.base[t + 1]], self.offsets[t]

    def part(self, rank: int, size: int) -> Bags:
        """The samples of one worker out of `size`."""
        samples = self.offsets.shape[1] - 1
        first, last = rank * samples // size, (rank + 1) * samples // size
        ids, offsets = [], []
        for t in range(self.num_tables):
            values, splits = self.table(t)
            ids.append(values[splits[first] : splits[last]])
            offsets.append(splits[first : last + 1] - splits[first])
        return _bags(np.stack(offsets), np.concatenate(ids))

    def stacked(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for one table that holds all others, `rows` each: ids and offsets [T * B + 1], table after table."""
        sizes = np.diff(self.base)
        ids = self.ids + np.repeat(np.arange(self.num_tables, dtype=np.int64) * rows, sizes)
        offsets = np.concatenate([(self.offsets[:, :-1] + self.base[:-1, None]).ravel(), self.base[-1:]])
        return ids, offsets


def _bags(offsets: np.ndarray, ids: np.ndarray) -> Bags:
    base = np.concatenate([[0], np.cumsum(offsets[:, -1])]).astype(np.int64)
    return Bags(offsets.astype(np.int64), ids.astype(np.int64), base)


def make_bags(
    *,
    tables: int,
    rows: int,
    batch: int,
    hotness: int,
    distribution: str,
    number: int,
    seed: int = 12,
    exponent: float = ZIPF_EXPONENT,
) -> Bags:
    """Batch `number` of T tables: 1..hotness ids for each sample, or exactly one if hotness is 1."""
    rng = np.random.default_rng([seed, number])
    lengths = rng.integers(1, hotness + 1, (tables, batch))
    offsets = np.zeros((tables, batch + 1), np.int64)
    np.cumsum(lengths, axis=1, out=offsets[:, 1:])
    total = int(offsets[:, -1].sum())
    if distribution == "uniform":
        return _bags(offsets, rng.integers(0, rows, total))
    if distribution != "zipf":
        raise ValueError(f"`distribution` must be one of {DISTRIBUTIONS}. Received: {distribution!r}.")
    ranks = _zipf(rows, exponent).draw(rng, total)
    # Frequent ids lie anywhere in a table, elsewhere in each: an odd factor permutes the row numbers.
    base = np.concatenate([[0], np.cumsum(offsets[:, -1])])
    ids = np.empty(total, np.int64)
    for t in range(tables):
        ids[base[t] : base[t + 1]] = permuted(ranks[base[t] : base[t + 1]], rows, t)
    return _bags(offsets, ids)


def permuted(ranks: np.ndarray, rows: int, table: int) -> np.ndarray:
    """A bijection of 0..rows-1, another one for each table: (rank * factor + shift) mod rows."""
    factor = 0x9E3779B1 + 2 * table
    while np.gcd(factor, rows) != 1:
        factor += 1
    return (ranks.astype(np.uint64) * np.uint64(factor) + np.uint64(table)) % np.uint64(rows)


@functools.cache
def _zipf(rows: int, exponent: float) -> Zipf:
    return Zipf(rows, exponent)


def make_w2(data: Path) -> None:
    """Writes what the C++ programs read for W2; Python makes the same with `w2_bags`."""
    for distribution in DISTRIBUTIONS:
        for number in range(W2_BATCHES):
            bags = w2_bags(distribution, number)
            bags.offsets.tofile(data / f"w2_{distribution}_{number}.offsets.bin")
            bags.ids.tofile(data / f"w2_{distribution}_{number}.ids.bin")


def w2_bags(distribution: str, number: int, batch: int = W2_BATCH, hotness: int = W2_HOTNESS) -> Bags:
    """Batch `number` of W2; of W4 too, with hotness 1 for one-hot."""
    return make_bags(
        tables=W2_TABLES, rows=W2_ROWS, batch=batch, hotness=hotness, distribution=distribution, number=number
    )


def make_w3(data: Path) -> None:
    """Writes what W3 reads."""
    rng = np.random.default_rng(13)
    keys, zipf = scattered_keys(0, W1_KEYS), Zipf(W1_KEYS)
    np.save(data / "w3_keys.npy", np.stack([keys[zipf.draw(rng, W3_KEYS)] for _ in range(W3_BATCHES)]))
    np.save(data / "w3_grads.npy", rng.standard_normal((W3_KEYS, W3_DIM), dtype=np.float32))


_MAKERS = {"w1": make_w1, "w2": make_w2, "w3": make_w3}


def ensure(family: str) -> None:
    """Makes the files of a family ('w1', 'w2', 'w3') unless they are there."""
    maker = _MAKERS.get(family)
    if maker is None:
        return
    data = data_dir()
    # The version counts when what is in the files changes.
    done = data / f"{family}.v1.done"
    if done.exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    maker(data)
    done.touch()


def load(name: str) -> np.ndarray:
    """One of the files, mapped: pages are read when touched."""
    return np.load(data_dir() / f"{name}.npy", mmap_mode="r")


def click_batch(number: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Dense features [B, 13] and labels [B, 1] of W4; what they say does not matter to the time they take."""
    rng = np.random.default_rng([14, number])
    dense = rng.random((batch, W4_DENSE), dtype=np.float32)
    return dense, (rng.random((batch, 1)) < 0.25).astype(np.float32)
