"""A table in memory and its twin over a file, which are told the same and must be the same, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.table import state as table_state
from tests.sok import own_rules

FILL = 2_000
"""Rows that there are from the beginning, of which `LITTLE` have few in memory."""

LITTLE = {"SOK_STORAGE_FRAMES": "16", "SOK_STORAGE_SEGMENT_BYTES": "8192"}
"""What tests set so that some hundred rows are too many for memory and the buffers of the file, whatever the budget."""

MEMORY = 2**24

RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: sok.optimizers.SGD(0.1),
    "Adagrad": lambda: sok.optimizers.Adagrad(0.1),
    "Adam": lambda: sok.optimizers.Adam(0.01),  # exact: rows that no step touches move, too
    "LazyAdam": lambda: sok.optimizers.LazyAdam(0.01),
    "own rule": lambda: own_rules.adagrad(0.1),
}
SLOTS = {"SGD": 0, "Adagrad": 1, "Adam": 2, "LazyAdam": 2, "own rule": 1}
_numbers = itertools.count()


def least_bytes(make: Callable[[int], Any], fill: Callable[[Any], Any]) -> int:
    """The least memory with which a table can be made and filled, as its refusals name it."""
    memory_bytes = 1
    while True:
        try:
            fill(make(memory_bytes))
        except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as refused:
            wanted = int(str(refused).split("at least ")[1].split()[0].rstrip(".,"))
            assert wanted > memory_bytes
            memory_bytes = wanted
        else:
            return memory_bytes


def new_table(folder: Path | None, dim: int = 3, rows: int = FILL, **options: Any) -> Any:
    """A table with the same seed as all others; over a file in `folder` if that is given."""
    number = next(_numbers)
    if folder is not None:
        options["storage"] = sok.Storage(memory_bytes=MEMORY, path=folder)
    return sok.EmbeddingVariable(dim, 2 * rows, name=f"stored_{number}", seed=5, **options)


def key_of(number: Any) -> Any:
    """Keys of hashed tables, negative ones too, that lie apart."""
    return np.asarray(number, np.int64) * 7919 - 10_000_000


def _assert_same(first: np.ndarray, second: np.ndarray) -> None:
    np.testing.assert_array_equal(first, second)
    assert first.dtype == second.dtype and first.tobytes() == second.tobytes()  # zeros have signs


@dataclasses.dataclass
class Twins:
    """`tables` are one in memory and one over a file; each has optimizers of its own, by rule."""

    folder: Path
    dim: int = 3
    hashed: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = FILL

    def __post_init__(self) -> None:
        self.tables = self._new()
        self.optimizers: list[dict[str, Any]] = [{}, {}]
        self.saves = [self.folder / "save_memory", self.folder / "save_file"]
        self.num_saves = 0
        values = np.random.default_rng(1).normal(size=[self.rows, self.dim]).astype(np.float32)
        self.each(lambda table, _: table.assign(self.keys(np.arange(self.rows)), values))

    def _new(self) -> list[Any]:
        return [
            new_table(folder, self.dim, self.rows, hashed=self.hashed, **self.options)
            for folder in (None, self.folder / "rows")
        ]

    def keys(self, numbers: Any) -> np.ndarray:
        return key_of(numbers) if self.hashed else np.asarray(numbers, np.int64)

    def each(self, function: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Calls it with each table and its optimizers; what it gives must be the same, bit for bit."""
        first, second = (
            tf.nest.map_structure(np.asarray, function(table, mine))
            for table, mine in zip(self.tables, self.optimizers, strict=True)
        )
        tf.nest.map_structure(_assert_same, first, second)

    def look_up(self, numbers: np.ndarray, training: bool = False) -> None:
        """Two features of the table, one pooled and one not, and the first row of all."""
        keys = self.keys(numbers)
        ragged = tf.RaggedTensor.from_row_lengths(keys, [0, len(keys) // 3, len(keys) - len(keys) // 3])
        single = tf.constant(keys[: len(keys) // 2, None])

        def both(table: Any, _: Any) -> Any:
            how = {"combiners": ["mean", "sum"], "training": training}
            return sok.group_embedding_lookup_sparse([table, table], [ragged, single], **how)

        self.each(both)

    def train(self, rule: str, numbers: np.ndarray) -> None:
        """A step of two features."""
        keys = self.keys(numbers)
        half = len(keys) // 2
        ragged = tf.RaggedTensor.from_row_lengths(keys[:half], [half // 2, half - half // 2])
        single = tf.constant(keys[half:, None])

        def step(table: Any, optimizers: dict[str, Any]) -> Any:
            with tf.GradientTape() as tape:
                found = sok.group_embedding_lookup_sparse([table, table], [ragged, single], combiners=["sum", "mean"])
                loss = tf.add_n([tf.reduce_sum(tf.square(one - 1.0)) for one in found])
            optimizer = optimizers.setdefault(rule, RULES[rule]())
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return found

        self.each(step)

    def assign(self, numbers: np.ndarray) -> None:
        values = np.random.default_rng(len(numbers)).normal(size=[len(numbers), self.dim]).astype(np.float32)
        self.each(lambda table, _: table.assign(self.keys(numbers), values))

    def erase(self, numbers: np.ndarray) -> None:
        self.each(lambda table, _: table.erase(self.keys(numbers)))

    def save(self, **how: Any) -> list[Any]:
        """Each into its own folder. Those in the background are what this gives, and may go on."""
        told = zip(self.tables, self.optimizers, self.saves, strict=True)
        saves = [sok.save(folder, [table], list(mine.values()), **how) for table, mine, folder in told]
        self.num_saves += 1
        return [save for save in saves if save is not None]

    def exchange(self) -> None:
        """Each goes on as a new table of the other kind: it is restored from what the other has saved."""
        self.save(incremental=True)
        names, fresh = [table.table_name for table in self.tables], self._new()
        optimizers = [{rule: RULES[rule]() for rule in mine} for mine in self.optimizers]
        for i in (0, 1):
            sok.restore(self.saves[1 - i], {names[1 - i]: fresh[i]}, list(optimizers[i].values()))
        self.tables, self.optimizers = fresh, optimizers
        self.saves = [self.folder / f"save_{self.num_saves}_{i}" for i in (0, 1)]

    def check(self) -> None:
        """All rows, slots and histories are the same."""
        self.each(lambda table, _: [*table.export(), table.step, table.num_rows()])
        self.each(lambda table, _: [table.slots(slot_set.name) for slot_set in table_state.slot_sets(table)])
        if self.tables[0].options.keeps_history:
            self.each(lambda table, _: table.history(self.keys(np.arange(FILL + 100))))
        told, other = (table.stats() for table in self.tables)
        assert {name: other[name] for name in told} == told
