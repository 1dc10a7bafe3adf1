"""A layer as users write it: one SparseTensor of 26 slots, one call a step: python -m benchmarks.layer.

sok has one DistributedEmbedding for all slots, each with rows of its own; stock TensorFlow a table and an
embedding_lookup_sparse for each. A step is a lookup, a gradient from outside and Adagrad. With *new* ids nine in ten
have never been seen: sok makes rows for them, stock TensorFlow has its rows beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.job import Case, Job, ratios

SLOTS, DIM, BATCH, HOTNESS, EXPONENT = 26, 16, 4096, 10, 1.2
ROWS = 1_000_000  # of each slot
BATCHES, NEW_STEPS = 8, workloads.W1_NEW_STEPS
_NEW_SHARE = 0.9
_MOST_IDS = 25_000  # of a slot in a batch
ALL_ROWS = ROWS + NEW_STEPS * _MOST_IDS


def batches(kind: str) -> Iterator[workloads.Bags]:
    """Ids 0..ROWS - 1 of each slot, or with kind 'new' above them where they have not come before."""
    for number in range(NEW_STEPS if kind == "new" else BATCHES):
        bags = workloads.make_bags(
            tables=SLOTS,
            rows=ROWS,
            batch=BATCH,
            hotness=HOTNESS,
            distribution="zipf",
            number=number,
            exponent=EXPONENT,
        )
        if kind != "new":
            yield bags
            continue
        is_new = np.random.default_rng([16, number]).random(len(bags.ids)) < _NEW_SHARE
        fresh = ROWS + number * _MOST_IDS + np.arange(len(bags.ids)) - np.repeat(bags.base[:-1], np.diff(bags.base))
        yield workloads.Bags(bags.offsets, np.where(is_new, fresh, bags.ids), bags.base)


def indices(lengths: np.ndarray) -> np.ndarray:
    """Of a SparseTensor whose row r has lengths[r] ids: [N, 2] int64."""
    first = np.concatenate([[0], np.cumsum(lengths)])
    row = np.repeat(np.arange(len(lengths)), lengths)
    return np.stack([row, np.arange(first[-1]) - first[row]], axis=1)


def together(bags: workloads.Bags, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """indices and ids [N] of one SparseTensor [BATCH * SLOTS, HOTNESS], sample after sample; apart: slot s begins at
    id s * ALL_ROWS.
    """
    lengths = np.diff(bags.offsets, axis=1)  # [SLOTS, BATCH]
    slot = np.repeat(np.arange(SLOTS), lengths.sum(axis=1))
    sample = np.concatenate([np.repeat(np.arange(BATCH), of_slot) for of_slot in lengths])
    order = np.lexsort((slot, sample))  # stable: ids of one segment stay in order
    ids = bags.ids + slot * ALL_ROWS if apart else bags.ids
    return indices(lengths.T.reshape(-1)), ids[order]


def _job(hashed: bool, kind: str, at_least: float) -> Job:
    table = "hashed" if hashed else "identity"
    what = "" if kind == "known" else ", 9 of 10 ids new"
    case = Case(f"layer, SparseTensor of {SLOTS} slots, {table}{what}", kind, ratios(tf=at_least))
    parameters: dict[str, Any] = {"kind": "layer", "hashed": hashed, "ids": kind}
    sizes = f"{SLOTS} slots x {ROWS:,} rows x {DIM} floats, batch {BATCH:,}, 1..{HOTNESS} ids, Zipf {EXPONENT}, Adagrad"
    return Job(f"layer/{table}-{kind}", parameters, ("sok", "tf"), (case,), sizes=sizes, gib=7.0)


def jobs() -> list[Job]:
    return [_job(hashed, kind, times) for kind, times in (("known", 4), ("new", 2.5)) for hashed in (True, False)]


if __name__ == "__main__":
    from benchmarks import cli

    sys.exit(cli.main([*([] if "--only" in sys.argv else ["--only", "layer/"]), *sys.argv[1:]]))
