"""Tables that have been trained, and all that can be seen of them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from sok.table import state as table_state

DIM = 3
RULES = {
    "SGD": lambda: sok.optimizers.SGD(0.1),
    "Adagrad": lambda: sok.optimizers.Adagrad(0.1, initial_accumulator_value=0.25),
    "Adam": lambda: sok.optimizers.Adam(0.01),
    "LazyAdam": lambda: sok.optimizers.LazyAdam(0.01),
    "Nadam": lambda: sok.OptimizerWrapper(keras.optimizers.Nadam(0.01)).embedding_optimizer,
}


def files_of(folder: Any) -> list[str]:
    """The names of a checkpoint's files, without the one that says who saves there."""
    return sorted(path.name for path in folder.iterdir() if path.name != "writer.json")


def contents(table: Any) -> dict[int, tuple]:
    """Of each key of this shard the row, and the slots of each set."""
    columns = [table.export()[1].numpy()]
    keys = table.export()[0].numpy()
    for slot_set in table_state.slot_sets(table):
        columns.append(table.slots(slot_set.name)[1].numpy())
    return {int(key): tuple(map(bytes, row)) for key, *row in zip(keys, *columns, strict=True)}


def assert_same_training(table: Any, optimizer: Any, other: Any, fresh: Any, steps: range) -> None:
    """Both tables have the same losses, and end with the same rows."""
    np.testing.assert_allclose(train(other, fresh, steps), train(table, optimizer, steps), rtol=1e-6)
    expected, found = contents(table), contents(other)
    assert found.keys() == expected.keys()
    if optimizer.rule != "adam":
        assert found == expected
        return
    # What an untouched row is owed is worked out in one piece here, and in two there: up to the save and after it.
    for key, row in expected.items():
        np.testing.assert_allclose(
            np.frombuffer(found[key][0], "f4"), np.frombuffer(row[0], "f4"), rtol=1e-5, atol=1e-7
        )


def batch(step: int, top: int = 60) -> np.ndarray:
    """Keys of a step: skewed, some twice, so that many rows are left out for long."""
    rng = np.random.default_rng(step)
    return np.minimum(rng.geometric(0.1, 12) * 7 - 20, top).astype(np.int64)


def train(table: Any, optimizer: Any, steps: range) -> list[float]:
    """Steps of a model that is pulled to 1; their losses."""
    losses = []
    for step in steps:
        keys = batch(step) if table.hashed and not table.key_dtype.is_unsigned else np.abs(batch(step))
        with tf.GradientTape() as tape:
            rows = lookup_rows(table, tf.cast(keys, table.key_dtype))
            loss = tf.reduce_mean(tf.square(rows - 1.0))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        losses.append(float(loss))
    return losses


def new_table(name: str = "item", capacity: int = 200, **settings: Any) -> sok.EmbeddingVariable:
    """A table whose seed is not that of its name, which is another one at each call."""
    return sok.EmbeddingVariable(DIM, capacity, name=name, seed=5, **settings)
