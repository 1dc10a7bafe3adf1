"""What a model looks up, for the planner: counted in a job that runs, or in batches at hand."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sok.base.types import PathLike
from sok.planning.distinct import skew_of
from sok.planning.tables import Model, Plannable, Table, model_of

if TYPE_CHECKING:
    from sok.lookup.feature import Feature
    from sok.table.table import EmbeddingVariable


@dataclasses.dataclass
class _Uses:
    """Of one table: sums over all calls that looked it up."""

    calls: float = 0.0
    features: float = 0.0
    samples: float = 0.0  # of each feature
    ids: float = 0.0
    distinct: float = 0.0  # keys of a call, of all its features together
    pooled: float = 0.0  # calls

    def add(self, ids: Sequence[np.ndarray], samples: Sequence[int], features: int, pooled: bool) -> None:
        """One call."""
        flat = np.concatenate([np.ravel(one) for one in ids]) if ids else np.zeros(0)
        self.calls += 1
        self.features += features
        self.samples += sum(samples)
        self.ids += flat.size
        self.distinct += np.unique(flat).size
        self.pooled += pooled

    def of(self, table: Table, steps: float) -> Table:
        """`table` with what was counted."""
        if not self.calls:
            return table
        features = max(1, round(self.features / max(steps, 1.0)))
        hotness = self.ids / self.samples if self.samples else 0.0
        skew = skew_of(self.ids / self.calls, self.distinct / self.calls, table.rows)
        pooled = 2 * self.pooled > self.calls
        return dataclasses.replace(table, hotness=[hotness] * features, skew=skew, distinct=None, pooled=pooled)


class Counts:
    """What was looked up inside `count_lookups`. `sok.plan` takes it as it takes a model; so does a file of it."""

    def __init__(self) -> None:
        self._lock, self._is_open = threading.Lock(), True
        self._tables: dict[str, tuple[EmbeddingVariable, int, _Uses]] = {}  # with its step when it was first seen
        self._last_steps: dict[str, int] = {}

    def as_model(self) -> Model:
        """The tables, sorted by name, with the rows that they have now and what was counted of all workers. Collective.

        Raises:
            ValueError: nothing was looked up, or workers have looked up different tables; on all workers.
        """
        from sok.job import context
        from sok.job.agreement import together

        said = together(context.get_transport(), "sok/count_lookups", self._sums)
        if not all(said):
            raise ValueError("no table was looked up while lookups were counted: nothing to place.")
        if any(list(one) != list(said[0]) for one in said):
            raise ValueError(f"workers have looked up different tables while lookups were counted: {said}.")
        found = []
        for name in said[0]:
            table, _, _ = self._tables[name]
            steps, *sums = np.sum([one[name] for one in said], axis=0)
            uses = _Uses(*map(float, sums))
            rows = table.num_keys or max(1, int(table.total_size()))
            shape = Table(rows, table.dim, hashed=table.hashed, name=name)
            found.append(uses.of(shape, float(steps) or uses.calls))
        return Model(tuple(found))

    def _sums(self) -> dict[str, list[float]]:
        """Of each table its steps, and the fields of its `_Uses`."""
        found = {}
        for name, (table, first, uses) in sorted(self._tables.items()):
            found[name] = [self._last_steps.get(name, int(table.step)) - first, *dataclasses.astuple(uses)]
        return found

    def save(self, path: PathLike) -> None:
        """Writes `as_model()` as a file that `sok plan` takes. Collective; worker 0 writes.

        Raises:
            OSError: it cannot be written; on all workers.
        """
        from sok.job import context
        from sok.job.agreement import together

        tables = [dataclasses.asdict(table) for table in self.as_model().tables]
        text = json.dumps({"tables": tables}, indent=1) + "\n"
        transport = context.get_transport()

        def write() -> None:
            if transport.rank == 0:
                Path(path).write_text(text, encoding="utf-8")

        together(transport, "sok/count_lookups/save", write)

    def _see(self, features: Sequence[Feature]) -> None:
        """Counts the lookup that is made, or built, now."""
        import tensorflow as tf

        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise RuntimeError("sok.count_lookups counts in eager mode and in tf.functions, not in v1 graphs.")
        by_table: dict[str, list[Feature]] = {}
        for feature in features:
            by_table.setdefault(feature.table.table_name, []).append(feature)
        for name, its in by_table.items():
            inputs = []
            for feature in its:
                keys, splits, _ = feature.ids.for_ops()
                inputs += [keys, splits, tf.shape(feature.ids.keys, tf.int64)]
            with tf.device("/CPU:0"):
                tf.numpy_function(self._counter(name, its), inputs, [])

    def _counter(self, name: str, features: Sequence[Feature]) -> Any:
        table, slots = features[0].table, [feature.slot_num for feature in features]
        are_rows = [feature.combiner == "rows" for feature in features]
        pooled = any(feature.combiner not in ("rows", "padded") for feature in features)

        def count(*inputs: np.ndarray) -> None:
            if not self._is_open:  # in a function that was traced inside
                return
            ids, samples = list(inputs[::3]), []
            for keys, splits, shape, is_rows in zip(ids, inputs[1::3], inputs[2::3], are_rows, strict=True):
                if len(splits) and (splits[0] < 0 or splits[-1] != (0 if is_rows else len(keys))):
                    return  # a report of what is wrong with ids: the lookup raises it
                samples.append((int(shape[0]) if len(shape) else 1) if is_rows else len(splits) - 1)
            with self._lock:
                _, _, uses = self._tables.setdefault(name, (table, int(table.step), _Uses()))
                uses.add(ids, samples, sum(slots), pooled)

        return count

    def _end(self) -> None:
        import tensorflow as tf

        self._is_open = False
        with tf.init_scope():
            self._last_steps = {name: int(table.step) for name, (table, _, _) in self._tables.items()}


@contextlib.contextmanager
def count_lookups() -> Iterator[Counts]:
    """Counts what is looked up inside, of any table: ids of a sample, how often they repeat, rows. For `sok.plan`.

    Lookups of a `tf.function` are counted if it is traced inside. Costs a sort of the ids of each call: some tens of
    steps of training tell enough.

    Returns:
        A context manager whose value is the `Counts`: give it to `sok.plan`, or write it by `save(path)` for the
        command `sok plan`.

    Raises:
        RuntimeError: at a lookup in a v1 graph.

    Not collective; `Counts.as_model`, which `sok.plan` calls, is.

    Example:
        >>> import tensorflow as tf, sok
        >>> table = sok.EmbeddingVariable(8, 1000, name="counted", options=sok.TableOptions(hashed=False))
        >>> with sok.count_lookups() as counts:
        ...     for _ in range(4):
        ...         rows = sok.all2all_dense_embedding(table, tf.constant([[1, 1, 1], [2, 1, 3]], tf.int64))
        >>> found = counts.as_model().tables[0]
        >>> found.name, found.rows, found.hotness, found.pooled
        ('counted', 1000, (3.0,), False)
        >>> sok.plan(counts, workers=2, batch=4096, machine="cpu_2_cores").tables[0].name
        'counted'
    """
    from sok.lookup import lookup

    counts = Counts()
    try:
        with lookup.shown_to(counts._see):
            yield counts
    finally:
        counts._end()


def sampled(tables: Plannable, batches: Iterable[Mapping[str, Any]], model: str | None = None) -> Model:
    """The tables with what some batches of real data have: ids of a sample, and how often they repeat.

    Args:
        tables, model: as of `sok.plan`.
        batches: each a dict: name of a table -> the ids of a batch of samples, [B], [B, h], ragged or sparse, integers;
            or a list of these, one for each feature that reads the table. Tables that no batch names stay as they are.

    Raises:
        ValueError: a batch names no table of the model, or ids make no sense. Not collective.

    Example:
        >>> random = np.random.default_rng(0)
        >>> batches = [{"user": random.integers(50, size=[512, 2])} for _ in range(3)]
        >>> found = sampled([dict(rows=50, dim=8, name="user"), dict(rows=9, dim=8, name="day")], batches)
        >>> found.tables[0].hotness, found.tables[0].skew, found.tables[1].hotness
        ((2.0,), 0.0, (1,))
    """
    asked = model_of(tables, model)
    uses = {table.name: _Uses() for table in asked.tables}
    for number, batch in enumerate(batches):
        for name, given in batch.items():
            if name not in uses:
                known = ", ".join(repr(one) for one in list(uses)[:8])
                raise ValueError(f"batch {number} names no table of the model: {name!r}. There are: {known}.")
            features = [_flat(one, name, number) for one in (given if isinstance(given, list | tuple) else [given])]
            pooled = next(table.pooled for table in asked.tables if table.name == name)
            uses[name].add([ids for ids, _ in features], [rows for _, rows in features], len(features), pooled)
    found = tuple(uses[table.name].of(table, uses[table.name].calls) for table in asked.tables)
    return dataclasses.replace(asked, tables=found)


def _flat(given: Any, name: str, number: int) -> tuple[np.ndarray, int]:
    """Ids of one feature, and how many samples there are."""
    if hasattr(given, "flat_values"):  # ragged
        ids, samples = np.asarray(given.flat_values), int(given.shape[0] or given.nrows())
    elif hasattr(given, "dense_shape"):  # sparse
        ids, samples = np.asarray(given.values), int(given.dense_shape[0])
    else:
        ids = np.asarray(given)
        samples = len(ids) if ids.ndim else 0
    if ids.dtype.kind not in "iu" or (not samples and ids.size) or not ids.ndim:
        raise ValueError(f"ids of table {name!r} in batch {number} must be integers [B], [B, h] or ragged: {given!r}.")
    return ids.ravel(), samples
