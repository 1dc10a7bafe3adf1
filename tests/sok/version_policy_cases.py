"""Tables with policies over files: saved by version and ordinarily at the same step, restored, compared, trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.table.counted import with_counted
from tests.sok.checkpoint_cases import contents
from tests.sok.storage_cases import MEMORY, RULES

DIM, CAPACITY, KEYS = 3, 20_000, 1_500
POLICIES: dict[str, dict[str, Any]] = {
    "counted": {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=6, every=2)},
    "filter": {
        "admission": sok.Admission(after=2, bloom=(65_536, 0.5)),
        "eviction": sok.Eviction(older_than=5, norm_below=0.05, every=3),
    },
    "shared": {
        "admission": sok.Admission(after=3, shared_rows=4096),
        "eviction": sok.Eviction(older_than=7, every=1),
    },
    "chance": {"admission": sok.Admission(probability=0.6), "eviction": sok.Eviction(older_than=4, every=1)},
    "full": {"eviction": sok.Eviction.least_frequent(4096, half_life=3)},
}


def make(kind: str, name: str, folder: Path | None = None, rule: str = "Adagrad") -> tuple[Any, Any]:
    """A table of one of the kinds, over a file if there is a folder for it, and its optimizer."""
    storage = None if folder is None else sok.Storage(memory_bytes=MEMORY, path=folder)
    table = sok.EmbeddingVariable(
        DIM,
        CAPACITY,
        name=name,
        seed=9,
        placement=sok.row_wise(hash=True),
        storage=storage,
        **POLICIES[kind],
    )
    return table, RULES[rule]()


def batch(step: int) -> np.ndarray:
    """Keys of all workers: those that come often move on, so that rows leave; some come once."""
    rng = np.random.default_rng(step)
    often = (rng.zipf(1.2, 300) + 60 * step) % KEYS
    return np.concatenate([often, rng.integers(0, 50 * KEYS, 40)])


def train(table: Any, optimizer: Any, steps: range) -> None:
    """Each worker has its part of each batch. Some keys are looked up for training and get no gradient; some are
    assigned, and erased."""
    for step in steps:
        keys = tf.constant(batch(step)[sok.rank() :: sok.size()])
        trained = len(keys) // 8 if step % 3 == 2 else len(keys)
        _look_up(table, keys[trained:])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(_look_up(table, keys[:trained]) - 1.0))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        if step % 4 == 1:
            table.assign(np.arange(3) + 7 * step, np.full([3, DIM], step, np.float32))
            table.erase(batch(step)[:5])


def _look_up(table: Any, keys: tf.Tensor) -> tf.Tensor:
    return sok.group_embedding_lookup_sparse([table], [keys[:, None]], combiners="sum", training=True)[0]


def holds(table: Any) -> dict[str, Any]:
    """All that a restore gives of this shard: rows, slots, histories, what was counted of keys without rows."""
    found = {name: contents(one) for name, one in with_counted({"table": table}).items()}
    keys = np.arange(-10, KEYS)
    found["history"] = [np.asarray(part).tolist() for part in table.history(keys)]
    return {**found, "step": int(table.step)}


def assert_goes_on_alike(found: dict[str, Any], expected: dict[str, Any], is_exact: bool) -> None:
    """Two tables hold the same after the same steps: bit for bit, or up to the order of sums, which on a GPU differs
    with that of rows."""
    if is_exact:
        assert found == expected
        return
    assert found.keys() == expected.keys() and found["history"] == expected["history"]
    assert found["step"] == expected["step"]
    for name in set(found) - {"history", "step"}:
        assert found[name].keys() == expected[name].keys(), name
        for key, parts in expected[name].items():
            for part, other in zip(found[name][key], parts, strict=True):
                if part != other:
                    np.testing.assert_allclose(np.frombuffer(part, "f4"), np.frombuffer(other, "f4"), 1e-5, 1e-7)
