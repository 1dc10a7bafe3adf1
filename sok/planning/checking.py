"""Trains some steps of a plan, and sets what they took beside what was predicted."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from sok.planning.distinct import draw
from sok.planning.planner import Plan
from sok.planning.tables import Model, Table
from sok.planning.where import Where

OPTIMIZERS = {"adagrad": "Adagrad", "adam": "Adam", "sgd": "SGD"}
_EXCHANGES = ("keys", "rows", "grads")
_FILLED = 1 << 19  # keys that a worker gives rows at once
_BATCHES = 4  # different ones, in turn: their rows are made before the clock starts


@dataclasses.dataclass(frozen=True)
class Checked:
    """Predicted and measured, of the tables alone.

    Attributes:
        parts: of a step, its exchanges and the rest -> milliseconds (predicted, measured on the slowest worker).
        bytes: 'keys', 'rows', 'grads' -> what this worker hands over in a step (predicted, measured), its own share
            included.
        memory: bytes of all rows with their slots and keys, of all workers together (predicted, measured). Copies of
            row numbers, which are variables of TensorFlow, are in neither.
    """

    parts: dict[str, tuple[float, float]]
    bytes: dict[str, tuple[float, float]]
    memory: tuple[float, float]

    def __str__(self) -> str:
        lines = [f"{'':<12}{'predicted':>12}{'measured':>12}{'ratio':>8}"]
        for names, unit, scale in (
            (self.parts, "ms", 1.0),
            (self.bytes, "MB", 1e-6),
            ({"memory": self.memory}, "MB", 1e-6),
        ):
            for name, (predicted, measured) in names.items():
                ratio = f"{predicted / measured:.2f}" if measured else "-"
                words = f"{name} {unit}"
                lines.append(f"{words:<12}{predicted * scale:>12.3f}{measured * scale:>12.3f}{ratio:>8}")
        return "\n".join(lines)


def check(plan: Plan, model: Model, steps: int = 20) -> Checked:
    """Makes the tables of a plan, trains them on ids drawn as it supposes, and measures. Collective.

    The dense part is not trained, and is in neither figure; nor is the reduction of copies, which rides on it: copies
    of row numbers are ordinary variables here, as in layers. Pooled features alone.

    Args:
        plan: of `model`, for as many workers as this job has.
        steps: that are timed.

    Raises:
        ValueError: the plan is for another number of workers, an optimizer that is not in `OPTIMIZERS`, or rows that
            are not pooled.
    """
    from sok.job import context

    transport = context.get_transport()
    if transport.size != plan.job.workers:
        raise ValueError(f"the plan is for {plan.job.workers} workers, and this job has {transport.size}.")
    if plan.job.rule not in OPTIMIZERS:
        raise ValueError(f"`optimizer` must be one of {', '.join(OPTIMIZERS)} to be checked: {plan.job.rule!r}.")
    if not all(table.pooled for table in model.tables):
        raise ValueError("tables whose rows are not pooled cannot be checked.")
    tables = _tables(plan, model)
    seconds, moved = train(plan, model, tables, steps)
    parts, handed = _beside(plan, transport.rank, [1e3 * part for part in seconds], moved)
    return Checked(parts, handed, _memory(plan, model, tables))


def trained(plan: Plan, model: Model, steps: int) -> float:
    """Seconds of a step of a plan's tables, which are made for it: the median of the slowest worker. Collective."""
    return train(plan, model, _tables(plan, model), steps)[0][0]


def train(plan: Plan, model: Model, tables: list[Any], steps: int) -> tuple[list[float], dict[str, float]]:
    """Trains the tables of a plan. Collective.

    Returns:
        Seconds of a step, of its exchanges 'keys', 'rows' and 'grads', and of the rest: medians, of the slowest
        worker. And the bytes that this worker hands over in each exchange of a step.
    """
    import tensorflow as tf

    from sok import optimizers
    from sok.base.tracing import collective_counts
    from sok.job import context
    from sok.lookup.group import group_embedding_lookup_sparse
    from sok.table.table import EmbeddingVariable

    transport = context.get_transport()
    optimizer = getattr(optimizers, OPTIMIZERS[plan.job.rule])(0.01)
    stock = getattr(tf.keras.optimizers, OPTIMIZERS[plan.job.rule])(0.01)
    params = [table for table, shape in zip(tables, model.tables, strict=True) for _ in shape.hotness]
    batches = [_batch(model, int(plan.job.samples), transport.rank, number) for number in range(_BATCHES)]

    @tf.function
    def step(*ids: Any) -> Any:
        with tf.GradientTape() as tape:
            pooled = group_embedding_lookup_sparse(params, list(ids), "sum")
            loss = tf.add_n([tf.reduce_sum(rows) for rows in pooled])
        pairs = list(zip(tape.gradient(loss, tables), tables, strict=True))
        for one, of_variables in ((optimizer, False), (stock, True)):
            own = [pair for pair in pairs if isinstance(pair[1], EmbeddingVariable) != of_variables]
            if own:
                one.apply_gradients(own)
        return loss

    for batch in batches * 2:
        step(*batch).numpy()
    transport.barrier("sok/check/begin")
    counts, times = [collective_counts()], []
    for number in range(steps):
        started = time.perf_counter()
        step(*batches[number % _BATCHES]).numpy()
        seconds = time.perf_counter() - started
        counts.append(collective_counts())
        exchanges = [_between(counts[-2], counts[-1], kind, "seconds") for kind in _EXCHANGES]
        # Of one step at a time: medians of the parts need not add up, and a rest of means may fall below zero.
        times.append([seconds, *exchanges, seconds - sum(exchanges)])
    everyone = transport.all_gather(tf.constant([np.median(times, axis=0)], tf.float32), "sok/check/times").numpy()
    moved = {kind: _between(counts[0], counts[-1], kind, "bytes") / steps for kind in _EXCHANGES}
    return [float(seconds) for seconds in everyone.max(axis=0)], moved


def _tables(plan: Plan, model: Model) -> list[Any]:
    import tensorflow as tf

    from sok.table.options import TableOptions
    from sok.table.table import EmbeddingVariable

    made = []
    for table, found in zip(model.tables, plan.tables, strict=True):
        placement = found.where.placement()
        if placement.is_copied and not table.hashed:
            made.append(tf.Variable(tf.zeros([table.rows, table.dim]), name=f"check_{table.name}"))
            continue
        options = TableOptions(
            placement=placement,
            initializer="zeros",
            hashed=table.hashed,
            num_keys=None if table.hashed else table.rows,
            way_home=plan.job.way_home,
            seed=1,
        )
        capacity = placement.share(table.rows, plan.job.workers)
        # A hash spreads keys unevenly.
        capacity += (capacity // 4 + 64) if table.hashed else 0
        made.append(EmbeddingVariable(table.dim, capacity, name=f"check_{table.name}", options=options))
    return made


def _batch(model: Model, samples: int, rank: int, number: int) -> list[Any]:
    """Ids of each feature, [samples, hotness], other ones on each rank."""
    import tensorflow as tf

    random = np.random.default_rng([21, rank, number])
    found = []
    for table in model.tables:
        for hotness in table.hotness:
            ids = max(1, round(hotness))
            keys = draw(random, table.rows, table.skew, samples * ids)
            found.append(tf.RaggedTensor.from_uniform_row_length(tf.constant(keys), ids))
    return found


def _between(before: dict[str, Any], after: dict[str, Any], kind: str, what: str) -> float:
    """Bytes or seconds of the collectives of a kind."""
    names = [name for name in after["by_name"] if kind in name.split("/")]
    return float(sum(after["by_name"][name][what] - before["by_name"][name][what] for name in names))


def _memory(plan: Plan, model: Model, tables: list[Any]) -> tuple[float, float]:
    """Bytes of all rows, predicted and measured. Gives every key its row first. Collective."""
    import tensorflow as tf

    from sok.job import context
    from sok.lookup.lookup import lookup_rows
    from sok.table.table import EmbeddingVariable

    transport = context.get_transport()
    predicted = measured = 0.0
    for table, shape, found in zip(tables, model.tables, plan.tables, strict=True):
        if not isinstance(table, EmbeddingVariable):
            continue
        for start in range(0, shape.rows, _FILLED * transport.size):
            first = min(shape.rows, start + transport.rank * _FILLED)
            keys = tf.range(first, min(shape.rows, first + _FILLED), dtype=tf.int64)
            lookup_rows(table, keys, training=True)
        predicted += _bytes_of_rows(plan, shape, found.where)
        measured += table.stats(details=True)["bytes_in_memory"]
    return predicted, measured


def _bytes_of_rows(plan: Plan, table: Table, where: Where) -> int:
    """On all workers together."""
    workers = plan.job.workers
    owners = {"row_wise": workers, "table_row_wise": len(where.owners), "data_parallel": workers}.get(where.kind, 1)
    rows = -(-table.rows // owners) if where.kind.endswith("row_wise") else table.rows
    widths = where.widths or (table.dim,) * owners
    return sum(dataclasses.replace(table, dim=dim).bytes_of(rows, plan.job.slot_floats(dim)) for dim in widths)


def _beside(
    plan: Plan, rank: int, measured: list[float], moved: dict[str, float]
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """`Checked.parts` and `Checked.bytes`."""
    step, *exchanges, rest = measured
    predicted = plan.step_ms - plan.phases["dense"]
    travel = {kind: plan.exchanges_ms[kind] for kind in moved}
    parts = {"step": (predicted, step)}
    parts |= {kind: (travel[kind], taken) for kind, taken in zip(moved, exchanges, strict=True)}
    parts["rest"] = (predicted - sum(travel.values()), rest)
    handed = plan.ranks[rank].handed
    return parts, {kind: (handed[kind], count) for kind, count in moved.items()}
