"""Programs that train by `sok.ahead` and without it, and what they leave behind, to the bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from sok.table import state

SAMPLES, IDS, NUM_KEYS = 6, 3, 40
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: sok.optimizers.SGD(0.1),
    "momentum": lambda: sok.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: sok.optimizers.Adagrad(0.1),
    "adam": lambda: sok.optimizers.Adam(0.1),  # exact: rows that no step touches move, too
    "lazy": lambda: sok.optimizers.LazyAdam(0.1),
    "ftrl": lambda: sok.optimizers.Ftrl(0.1),
}
BETWEEN = ("nothing", "evaluate", "erase", "save", "restore")
# What tables are like; of a folder.
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "by key": lambda _: {},
    "by hash": lambda _: {"placement": sok.row_wise(hash=True)},
    "whole": lambda _: {"placement": sok.table_wise(0)},
    "in columns": lambda _: {"placement": sok.column_wise(2)},
    "in copies": lambda _: {"placement": sok.data_parallel()},
    "sums": lambda _: {"way_home": "sums"},
    "16 bit": lambda _: {"exchange_dtype": "float16"},
    "policies": lambda _: {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=2, every=1)},
    "in a file": lambda folder: {"storage": sok.Storage(memory_bytes=2**24, path=folder / "rows")},
}
_names = itertools.count()


@dataclasses.dataclass
class Program:
    """Tables, looked up in several ways, and a step that trains them and an ordinary variable."""

    optimizer: Any
    tables: list[sok.EmbeddingVariable]
    layer: Any
    plain: tf.Variable
    in_function: bool
    traces: int = 0

    @classmethod
    def make(cls, optimizer: str, in_function: bool, **options: Any) -> Program:
        name = f"ahead_{next(_names)}"
        # Names decide of no value; seeds do, with the names by default.
        options = {"initializer": "uniform"} | options
        tables = [sok.EmbeddingVariable(d, 200, name=f"{name}_{d}", seed=d, **options) for d in (2, 4)]
        layer = sok.DistributedEmbedding("mean", 200, 3, 2, 8, name=f"{name}_layer", embedding_initializer="ones")
        plain = tf.Variable(np.arange(NUM_KEYS * 2, dtype=np.float32).reshape(NUM_KEYS, 2) / 50)
        program = cls(OPTIMIZERS[optimizer](), tables, layer, plain, in_function)
        program.layer(tf.zeros([0, 2, 1], tf.int64))
        program._compiled = tf.function(program._step, reduce_retracing=True) if in_function else program._step
        return program

    @property
    def all_tables(self) -> list[sok.EmbeddingVariable]:
        return [*self.tables, self.layer.embedding_variable]

    def look_up(self, batch: dict[str, Any], training: bool = True) -> list[tf.Tensor]:
        ids, weights = batch["ids"], batch["weights"]
        pooled = sok.group_embedding_lookup_sparse(
            [self.tables[0], self.plain, self.tables[1]],
            [ids, ids, ids * 2],
            ["sum", "mean", "sqrtn"],
            sp_weights=[weights, None, None],
            training=training,
        )
        padded = sok.group_embedding_lookup_sparse([self.tables[0]], [ids], is_sequence=True, training=training)
        rows = lookup_rows(self.tables[1], batch["keys"] + 1, training=training)
        slots = self.layer(tf.stack([batch["keys"], batch["keys"] + 3], 1), training=training)
        # Its ids come from the rows of another: it is made in the step.
        chosen = tf.cast(tf.abs(rows[:, 0, 0]) * 1e3, tf.int64) % NUM_KEYS
        late = lookup_rows(self.tables[0], chosen, training=training)
        return [*pooled, *padded, rows, slots, late]

    def step(self, batch: dict[str, Any], ticket: Any = None) -> list[np.ndarray]:
        return [t.numpy() for t in self._compiled(batch, ticket)]

    def _step(self, batch: dict[str, Any], ticket: Any) -> list[tf.Tensor]:
        self.traces += 1
        variables = [*self.all_tables, self.plain]
        with tf.GradientTape() as tape:
            if ticket is None:
                found = self.look_up(batch)
            else:
                with ticket:
                    found = self.look_up(batch)
            loss = tf.add_n([tf.reduce_sum(tf.square(one - 0.3)) / 8 for one in found])
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients[:-1], variables[:-1], strict=True))
        self.plain.assign_sub(0.1 * tf.convert_to_tensor(gradients[-1]))
        return [loss, *found]

    def do(self, what: str, folder: Path) -> None:
        if what == "evaluate":
            for one in self.look_up(batch_of(99, 0, 1), training=False):
                one.numpy()
        elif what == "erase":
            self.tables[0].erase(np.arange(0, NUM_KEYS, 3))
        elif what in ("save", "restore"):
            sok.save(folder, self.all_tables, self.optimizer)
            if what == "restore":
                self.tables[1].assign(np.arange(5), np.ones([5, 4], np.float32))
                sok.restore(folder, self.all_tables, self.optimizer)

    def left(self) -> dict[str, Any]:
        """What the program leaves behind: rows, slots and stamps of each key, and the variable."""
        found: dict[str, Any] = {"plain": self.plain.numpy(), "steps": [int(t.step) for t in self.all_tables]}
        for i, table in enumerate(self.all_tables):
            for slot_set in state.slot_sets(table):
                found[f"{i}/{slot_set.rule}"] = [tensor.numpy() for tensor in table.slots(slot_set.name)]
            found[f"{i}/ids_seen"] = int(table.ids_seen)
            if table.options.admission is not None:
                counts = state.local_stats(table)
                found[f"{i}/counts"] = [counts[name] for name in ("rows", "candidates", "made", "refused", "evicted")]
                found[f"{i}/history"] = [t.numpy() for t in table.history(np.arange(2 * NUM_KEYS))]
            found[f"{i}/rows"] = [tensor.numpy() for tensor in table.export()]
        return found


def batch_of(number: int, rank: int, size: int, seed: int = 0, most: int = SAMPLES) -> dict[str, Any]:
    """One batch of this rank: ragged ids with weights, of which some samples and some batches have none, and keys."""
    rng = np.random.default_rng([seed, number, rank, size])
    samples = int(rng.integers(0, most + 1))
    lengths = rng.integers(0, IDS + 1, samples)
    ids = rng.integers(0, NUM_KEYS, lengths.sum())
    keys = rng.integers(0, NUM_KEYS, [samples, 2])
    weights = rng.normal(size=len(ids)).astype(np.float32)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    return {
        "ids": tf.RaggedTensor.from_row_splits(tf.constant(ids, tf.int64), splits),
        "weights": tf.RaggedTensor.from_row_splits(tf.constant(weights), splits),
        "keys": tf.constant(keys, tf.int64),
    }


class Batches:
    """An iterable that can be begun anew, as a dataset can."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def same(one: Any, other: Any) -> None:
    """AssertionError unless both are equal to the bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other


def compare(
    optimizer: str,
    in_function: bool,
    depth: int,
    between: list[str],
    folder: Path,
    rank: int = 0,
    size: int = 1,
    seed: int = 0,
    fewer: int = 0,
    kind: str = "by key",
    **schedule: Any,
) -> Program:
    """Trains synchronously and ahead, `between[i]` after step i, twice over the batches; all must be equal.

    The synchronous loop has batches without samples where the last rank has `fewer`; ahead they are made.
    """
    mine = len(between) - fewer * (rank == size - 1)
    batches = [batch_of(i, rank, size, seed, SAMPLES if i < mine else 0) for i in range(len(between))]
    plain, early = (Program.make(optimizer, in_function, **KINDS[kind](folder / str(rank))) for _ in range(2))
    pipeline = sok.ahead(Batches(batches[:mine]), early.look_up, depth=depth, **schedule)
    for epoch in range(2):
        steps = 0
        for i, (batch, ticket) in enumerate(pipeline):
            assert batch is batches[i] if i < mine else batch["keys"].shape == [0, 2]
            assert ticket.has_batch == (i < mine)
            same(plain.step(batches[i]), early.step(batch, ticket))
            plain.do(between[i], folder / f"plain_{epoch}_{i}")
            early.do(between[i], folder / f"early_{epoch}_{i}")
            steps += 1
        assert steps == len(batches)
        same(plain.left(), early.left())
    return early


def compare_in_a_function(
    optimizer: str,
    depth: int,
    steps: int,
    folder: Path,
    rank: int = 0,
    size: int = 1,
    seed: int = 0,
    fewer: int = 0,
    kind: str = "by key",
    **schedule: Any,
) -> None:
    """As `compare`, with the loop inside a `tf.function`, which is traced once."""
    mine = steps - fewer * (rank == size - 1)
    batches = [batch_of(i, rank, size, seed, SAMPLES if i < mine else 0) for i in range(steps)]
    plain, early = (Program.make(optimizer, True, **KINDS[kind](folder / str(rank))) for _ in range(2))
    pipeline = sok.ahead(Batches(batches[:mine]), early.look_up, depth=depth, **schedule)
    seen: list[Any] = []

    def note(has_batch: np.bool_, *found: np.ndarray) -> np.int64:
        seen.append([bool(has_batch), *found])
        return np.int64(0)

    @tf.function
    def epoch() -> None:
        for batch, ticket in pipeline:
            found = early._step(batch, ticket)
            tf.numpy_function(note, [ticket.has_batch, *found], tf.int64)

    for _ in range(2):
        seen.clear()
        epoch()
        same(seen, [[i < mine, *plain.step(batch)] for i, batch in enumerate(batches)])
        same(plain.left(), early.left())
    assert early.traces == 1
