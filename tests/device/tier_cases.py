"""A table on a GPU that has room for few of its rows, and its twin on the CPU, which are told the same."""

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
from tests.sok.storage_cases import MEMORY

from .conftest import GPU

CPU = "/CPU:0"
DIM = 3
FILL = 1_000
"""Rows that there are from the beginning: more than `LITTLE` have room for."""

LITTLE = 80_000
"""Bytes of the GPU that have room for some hundred rows."""

RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: sok.optimizers.SGD(0.1),
    "Adagrad": lambda: sok.optimizers.Adagrad(0.1),
    "Adam": lambda: sok.optimizers.Adam(0.01),  # exact: rows that no step touches move, too
    "LazyAdam": lambda: sok.optimizers.LazyAdam(0.01),
    "Ftrl": lambda: sok.optimizers.Ftrl(0.1),
}
_numbers = itertools.count()


def new_table(device: str, folder: Path | None = None, gpu_bytes: int = LITTLE, **options: Any) -> Any:
    """A table with the same seed as all others; over a file if there is a folder for it."""
    where = {} if folder is None else {"memory_bytes": MEMORY, "path": folder}
    storage = sok.Storage(gpu_bytes=gpu_bytes, **where) if folder or device != CPU else None
    with tf.device(device):
        options = {"seed": 5, "storage": storage, "name": f"tiered_{next(_numbers)}", **options}
        table = sok.EmbeddingVariable(options.pop("dim", DIM), options.pop("capacity", 2 * FILL), **options)
    assert device.strip("/") in table.handle.device
    return table


def key_of(number: Any) -> np.ndarray:
    """Keys of hashed tables, negative ones too, that lie apart."""
    return np.asarray(number, np.int64) * 7919 - 1_000_000


def assert_close(found: Any, expected: Any) -> None:
    """Floats up to the order of sums, all else as it is."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)


@dataclasses.dataclass
class Twins:
    """`tables` are one on the CPU and one on the GPU; each has a plain variable beside it, and optimizers by rule."""

    folder: Path
    over_a_file: bool = False
    hashed: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    fill: bool = True

    def __post_init__(self) -> None:
        self.tables = self._new(LITTLE)
        self.plain = []
        for device in (CPU, GPU):
            with tf.device(device):
                self.plain.append(tf.Variable(np.linspace(-1, 1, 8 * DIM, dtype=np.float32).reshape(8, DIM)))
        self.optimizers: list[dict[str, Any]] = [{}, {}]
        self.saves = [self.folder / "save_cpu", self.folder / "save_gpu"]
        self.num_saves = 0
        if self.fill:
            values = np.random.default_rng(1).normal(size=[FILL, DIM]).astype(np.float32)
            self.each(lambda table, _: table.assign(self.keys(np.arange(FILL)), values))

    def _new(self, gpu_bytes: int) -> list[Any]:
        folder = self.folder / "rows" if self.over_a_file else None
        return [new_table(device, folder, gpu_bytes, hashed=self.hashed, **self.options) for device in (CPU, GPU)]

    def keys(self, numbers: Any) -> np.ndarray:
        return key_of(numbers) if self.hashed else np.asarray(numbers, np.int64)

    def each(self, function: Callable[[Any, int], Any]) -> None:
        """Calls it with each table and its number, on its device; what it gives must be the same."""
        results = []
        for number, table in enumerate(self.tables):
            with tf.device((CPU, GPU)[number]):
                results.append(tf.nest.map_structure(np.asarray, function(table, number)))
        tf.nest.map_structure(assert_close, results[1], results[0])

    def look_up(self, numbers: np.ndarray, training: bool = False) -> None:
        """A group of two features of the table, one with weights, and one of a plain variable."""
        keys = self.keys(numbers)
        ragged = tf.RaggedTensor.from_row_lengths(keys, [0, len(keys) // 3, len(keys) - len(keys) // 3])
        single = tf.constant(keys[: len(keys) // 2, None])
        weights = ragged.with_values(np.linspace(0.5, 2.0, len(keys), dtype=np.float32))
        dense = tf.constant([[1, 7], [0, 0]])

        def both(table: Any, number: int) -> Any:
            return sok.group_embedding_lookup_sparse(
                [table, table, self.plain[number]],
                [ragged, single, dense],
                combiners=["mean", "sum", "sum"],
                sp_weights=[weights, None, None],
                training=training,
            )

        self.each(both)

    def train(self, rule: str, numbers: np.ndarray) -> None:
        """A step of three features, with gradients of weights and of a plain variable; a second lookup, and one for
        evaluation in between."""
        keys = self.keys(numbers)
        half = len(keys) // 2
        ragged = tf.RaggedTensor.from_row_lengths(keys[:half], [half // 2, half - half // 2])
        single, evaluated = tf.constant(keys[half:, None]), self.keys(np.arange(60) * 7 + len(numbers))
        values = np.linspace(0.5, 2.0, half, dtype=np.float32)
        dense = tf.constant([[1, 7], [3, len(numbers) % 8]])

        def step(table: Any, number: int) -> Any:
            optimizer = self.optimizers[number].setdefault(rule, RULES[rule]())
            factors = tf.constant(values)
            with tf.GradientTape() as tape:
                tape.watch(factors)
                found = sok.group_embedding_lookup_sparse(
                    [table, table, self.plain[number]],
                    [ragged, single, dense],
                    combiners=["sum", "mean", "sum"],
                    sp_weights=[ragged.with_values(factors), None, None],
                )
                read = table.sparse_read(evaluated)
                more = tf.nn.embedding_lookup(table, tf.constant(keys[:5]))
                loss = tf.add_n([tf.reduce_sum(tf.square(one - 1.0)) for one in [*found, more]])
            gradients = tape.gradient(loss, [table, self.plain[number], factors])
            optimizer.apply_gradients([(gradients[0], table)])
            self.plain[number].assign_sub(0.01 * tf.convert_to_tensor(gradients[1]))
            return [*found, read, more, loss, gradients[2]]

        self.each(step)

    def assign(self, numbers: np.ndarray) -> None:
        values = np.random.default_rng(len(numbers)).normal(size=[len(numbers), DIM]).astype(np.float32)
        self.each(lambda table, _: table.assign(self.keys(numbers), values))

    def erase(self, numbers: np.ndarray) -> None:
        self.each(lambda table, _: table.erase(self.keys(numbers)))

    def read(self, numbers: np.ndarray) -> None:
        self.each(lambda table, _: table.sparse_read(self.keys(numbers)))

    def save(self, **how: Any) -> list[Any]:
        """Each into its own folder. Those in the background are what this gives, and may go on."""
        told = zip(self.tables, self.optimizers, self.saves, strict=True)
        saves = [sok.save(folder, [table], list(mine.values()), **how) for table, mine, folder in told]
        self.num_saves += 1
        self.saved_rules = list(self.optimizers[0])
        return [save for save in saves if save is not None]

    def exchange(self, gpu_bytes: int) -> None:
        """Each goes on as a new table, that of the GPU with more room or less, from what the other has saved."""
        self.save(incremental=True)
        names, fresh = [table.table_name for table in self.tables], self._new(gpu_bytes)
        optimizers = [{rule: RULES[rule]() for rule in mine} for mine in self.optimizers]
        for i in (0, 1):
            sok.restore(self.saves[1 - i], {names[1 - i]: fresh[i]}, list(optimizers[i].values()))
        self.tables, self.optimizers = fresh, optimizers
        self.saves = [self.folder / f"save_{self.num_saves}_{i}" for i in (0, 1)]

    def restore(self) -> None:
        """Each into itself, what it has saved last, if it has."""
        for table, mine, folder in zip(self.tables, self.optimizers, self.saves, strict=True):
            if folder.exists():
                sok.restore(folder, [table], [mine[rule] for rule in self.saved_rules])

    def check(self) -> None:
        """All rows, slots and histories are the same."""
        self.each(lambda table, _: [*table.export(), table.step, table.num_rows()])
        sets = [[(s.rule, s.num_slots, s.calls) for s in table_state.slot_sets(table)] for table in self.tables]
        assert sets[0] == sets[1]
        self.each(lambda table, _: [table.slots(slot_set.name) for slot_set in table_state.slot_sets(table)])
        if self.tables[0].options.keeps_history:
            self.each(lambda table, _: table.history(self.keys(np.arange(FILL + 100))))
        told, found = (table.stats() for table in self.tables)
        assert {name: found[name] for name in told if name in COUNTS} == {
            name: told[name] for name in told if name in COUNTS
        }
        assert found["gpu_rows"] <= found["gpu_cache_rows"]
        assert found["bytes_on_gpu"] <= self.tables[1].options.storage.gpu_bytes


COUNTS = ("rows", "candidates", "made", "refused", "evicted")
