"""Tables that are full, and rows that keys share, beside their twins of NumPy: on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup.lookup import lookup_rows
from sok.table.state import count_step
from tests.reference.policies import FullTable, SharingTable

MOST = 8192
FULL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recent": ({}, {}),
    "frequent": ({"protect": (3, -5)}, {"frequent": True, "protect": frozenset((3, -5))}),
    "fading": ({"half_life": 2}, {"frequent": True, "half_life": 2}),
}
"""Arguments of `Eviction`, and of the twin."""


def gathered(array: Any) -> np.ndarray:
    """Those of all workers."""
    return context.get_transport().all_gather(tf.constant(np.asarray(array)), "full/keys").numpy()


def storage_of(folder: Path | None) -> sok.Storage | None:
    return None if folder is None else sok.Storage(memory_bytes=2**23, path=folder)


def full_case(kind: str, folder: Path | None = None, ahead: bool = False) -> None:
    """Five steps of all workers, of which the last ones overflow."""
    given, of_twin = FULL[kind]
    make = sok.Eviction.least_recent if kind == "recent" else sok.Eviction.least_frequent
    table = sok.EmbeddingVariable(
        2,
        2 * MOST,
        name=f"full_{kind}",
        initializer="ones",
        placement=sok.row_wise(hash=True),
        eviction=make(MOST, **given),
        storage=storage_of(folder),
    )
    assert table.options.eviction.max_rows == MOST
    told: list[int] = []

    def hear(keys: np.ndarray, rows: np.ndarray) -> None:
        told.extend(keys.tolist())
        np.testing.assert_array_equal(rows, np.ones([len(keys), 2]))

    table.on_evicted(hear)
    twin, rng = FullTable(MOST, **of_twin), np.random.default_rng(3)
    batches = [np.append(rng.choice(9000, 3600), [3, -5] if step == 0 else [7]) for step in range(5)]
    mine = [tf.constant(batch[sok.rank() :: sok.size()]) for batch in batches]

    def look_up(keys: tf.Tensor) -> tf.Tensor:
        return lookup_rows(table, keys)

    steps = sok.ahead(mine, look_up, depth=2) if ahead else [(keys, None) for keys in mine]
    for number, (keys, ticket) in enumerate(steps):
        if ticket is None:
            look_up(keys)
        else:
            with ticket:
                look_up(keys)
        count_step([table])
        twin.train(batches[number], number + 1)
        here = np.sort(gathered(table.export()[0].numpy()))
        np.testing.assert_array_equal(here, sorted(twin.seen))
    assert sorted(gathered(told)) == sorted(twin.evicted) and len(twin.evicted) > 200
    stats = table.stats(details=True)
    assert (stats["rows"], stats["evicted"]) == (len(twin.seen), len(twin.evicted))
    assert stats["bytes_in_memory"] > 0 and stats["collisions"] >= 0


def shared_case(folder: Path | None = None) -> None:
    """Keys of few, so that they come to their own rows, beside some that never do."""
    table = sok.EmbeddingVariable(
        1,
        20000,
        name="sharing",
        initializer="ones",
        placement=sok.row_wise(hash=True),
        admission=sok.Admission(after=3, shared_rows=4096),
        storage=storage_of(folder),
    )
    twin, rng, optimizer = SharingTable(3, 4096, 1.0), np.random.default_rng(4), sok.optimizers.SGD(1.0)
    for step in range(6):
        batch = np.concatenate([rng.choice(40, 24), rng.choice(10**6, 12)])
        mine = np.arange(len(batch))[sok.rank() :: sok.size()]
        with tf.GradientTape() as tape:
            rows = lookup_rows(table, tf.constant(batch[mine]))
            loss = tf.reduce_sum(rows) / 8.0
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        np.testing.assert_array_equal(rows.numpy().ravel(), np.array(twin.train(batch, 1 / 8))[mine], str(step))
        keys = np.arange(0, 60)
        read = table.sparse_read(tf.constant(keys)).numpy().ravel()
        np.testing.assert_array_equal(read, [twin.read(key) for key in keys.tolist()])
    assert len(twin.own) > 20 and table.stats()["rows"] == len(twin.own) + len(twin.shared)
