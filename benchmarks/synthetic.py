"""Synthetic models of NVIDIA-Merlin/distributed-embeddings, `tiny` to `colossal`, `criteo` (synthetic_models.json)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).resolve().parent / "synthetic_models.json"
# As the peer's benchmark sets them.
LEARNING_RATES = {"sgd": 0.03, "adagrad": 0.001, "adam": 0.001}
NUM_BATCHES = 4
# Ways to place tables: all in rows, Merlin's, and that of sok.plan.
STRATEGIES = ("row_wise", "basic", "memory_balanced", "memory_optimized", "auto")


@dataclasses.dataclass(frozen=True)
class Table:
    rows: int
    width: int
    hotness: tuple[int, ...]  # one input for each; they share the table


@dataclasses.dataclass(frozen=True)
class Feature:
    table: int
    hotness: int
    rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    tables: tuple[Table, ...]
    numbers: int
    mlp: tuple[int, ...]
    exponent: float
    stride: int = 1  # so many neighbours of the row of all embeddings are averaged

    def features(self) -> list[Feature]:
        """Inputs table by table, in order of hotness."""
        return [Feature(t, h, table.rows, table.width) for t, table in enumerate(self.tables) for h in table.hotness]

    @property
    def width(self) -> int:
        """Length of the row that the MLP gets."""
        return -(-sum(f.width for f in self.features()) // self.stride) + self.numbers

    @property
    def bytes(self) -> int:
        """All tables, without optimizer slots."""
        return 4 * sum(t.rows * t.width for t in self.tables)

    def scaled(self, factor: int) -> Model:
        """The same with a `factor`-th of the rows of every table, at least one."""
        return dataclasses.replace(
            self, tables=tuple(dataclasses.replace(t, rows=max(1, t.rows // factor)) for t in self.tables)
        )


def load(name: str) -> Model:
    """One of the models by name. Raises KeyError for another."""
    description = json.loads(PATH.read_text())
    one = description["models"][name]
    tables = [
        Table(group["rows"], group["width"], tuple(group["hotness"]))
        for group in one["tables"]
        for _ in range(group["count"])
    ]
    stride = one.get("interact_stride", 1)
    return Model(name, tuple(tables), one["numbers"], tuple(one["mlp"]), description["exponent"], stride)


def power_law(rng: np.random.Generator, rows: int, size: int, exponent: float) -> np.ndarray:
    """Ids as the peer draws them: the inverse of a continuous power law on [1, rows + 1), cut to whole numbers."""
    g = 1.0 - exponent
    x = (rng.random(size) * ((rows + 1.0) ** g - 1.0) + 1.0) ** (1.0 / g)
    return np.clip(np.floor(x).astype(np.int64) - 1, 0, rows - 1)


def make_batch(model: Model, batch: int, number: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Numbers [B, n], labels [B, 1], and for each feature ids [B, hotness]."""
    rng = np.random.default_rng([15, number])
    numbers = rng.uniform(0, 100, (batch, model.numbers)).astype(np.float32)
    labels = rng.integers(0, 2, (batch, 1)).astype(np.float32)
    ids = [power_law(rng, f.rows, batch * f.hotness, model.exponent).reshape(batch, -1) for f in model.features()]
    return numbers, labels, ids


def batches(tf: Any, model: Model, batch: int) -> list[list[Any]]:
    """A few batches as tensors: numbers, labels, ids of each feature."""
    made = []
    for number in range(NUM_BATCHES):
        numbers, labels, ids = make_batch(model, batch, number)
        made.append([tf.constant(numbers), tf.constant(labels), *(tf.constant(one) for one in ids)])
    return made


def signature(tf: Any, model: Model, batch: int) -> list[Any]:
    """What fits `batches`."""
    ids = [tf.TensorSpec([batch, f.hotness], tf.int64) for f in model.features()]
    return [tf.TensorSpec([batch, model.numbers], tf.float32), tf.TensorSpec([batch, 1], tf.float32), *ids]
