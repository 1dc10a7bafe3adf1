"""Fits the constants of a machine to training steps: what one operation takes alone is not what it takes in a step.

Of some models the whole step is measured. The cost model says what each constant brings to it; least squares then say
by how much each has to be stretched for the predictions to be right, as a ratio, over all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sok.planning import checking
from sok.planning.machine import Link, Machine
from sok.planning.planner import plan
from sok.planning.tables import Model, Table, model_of


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model that is trained: so many tables alike, a batch of all workers, one placement."""

    tables: int
    rows: int
    dim: int
    hotness: int
    batch: int
    kind: str = "row_wise"
    hashed: bool = False

    def model(self) -> Model:
        """As many tables, of unequal rows: equal ones might be fused."""
        return model_of(
            [Table(self.rows + 7 * i, self.dim, [self.hotness], hashed=self.hashed) for i in range(self.tables)]
        )


# In each something else takes most: steps, tables, distinct keys, pooled ids, records, wide rows, keys found, copies.
SHAPES = (
    Shape(1, 200_000, 16, 1, 1024),
    Shape(32, 1000, 8, 1, 1024),
    Shape(128, 1000, 8, 1, 512),
    Shape(8, 100_000, 16, 10, 4096),
    Shape(4, 200_000, 64, 10, 8192),
    Shape(26, 30_000, 16, 1, 4096, hashed=True),
    Shape(8, 100_000, 128, 1, 8192),
    Shape(2, 300_000, 32, 30, 4096, hashed=True),
    Shape(8, 50_000, 32, 1, 2048, kind="data_parallel"),
    Shape(26, 20_000, 16, 1, 4096, kind="table_wise"),  # of several workers alone: of one it is row_wise
    Shape(128, 1000, 8, 1, 512, kind="table_wise"),
)

_FREE = 1e30  # a rate that takes no time
_RATES = ("stream", "unique", "probe", "copied")
_COSTS = ("per_table", "per_piece", "per_step")
# Times that were measured alone: the fit is held to them a little, where the steps say nothing of them.
_HOLD = 0.005
_ROUNDS = 5000  # of least squares, a coordinate at a time: some hundred would do


def fitted(machine: Machine, steps: int = 12, shapes: Sequence[Shape] = SHAPES) -> Machine:
    """The machine with constants by which its training steps are predicted best. Collective. Takes about half a minute.

    Args:
        machine: what was measured of each operation alone.
        steps: that are timed of each model.

    Returns:
        The machine; its `measured` has 'steps': milliseconds of each, predicted before, measured, predicted now.
    """
    from sok.job import context

    workers = context.get_transport().size
    if workers == 1:  # which owns each piece of each table: what a piece takes is in what a table takes
        machine = _with(machine, per_piece=0.0)
    roomy = _with(machine, memory=10**15)
    shapes = [shape for shape in shapes if workers > 1 or shape.kind != "table_wise"]
    taken = []
    for shape in shapes:
        model = shape.model()
        made = plan(model, workers, batch=shape.batch, machine=roomy, strategy=shape.kind)
        taken.append(checking.trained(made, model, steps) * 1e3)
    knobs = _knobs(machine, workers)
    names = list(knobs)
    shares = np.array(
        [[_predicted(shape, workers, knobs[name](1.0, free(machine))) for name in names] for shape in shapes]
    )
    times = stretched(shares / np.array(taken)[:, None], np.array([name not in _COSTS for name in names]))
    found = machine
    for name, factor in zip(names, times, strict=True):
        found = knobs[name](float(factor), found)
    before = shares.sum(axis=1)
    points = [[float(part) for part in point] for point in zip(before, taken, shares @ times, strict=True)]
    return _with(found, measured={**machine.measured, "steps": points})


def _with(machine: Machine, **changes: Any) -> Machine:
    return dataclasses.replace(machine, **changes)


def free(machine: Machine) -> Machine:
    """A machine that takes no time for anything."""
    link = Link(0.0, _FREE)
    rates = {name: _FREE for name in (*_RATES, "flops")}
    links = dict.fromkeys(("within", "between", "all_reduce_within", "all_reduce_between"), link)
    return _with(
        machine, gather={1: _FREE}, update={1: _FREE}, **rates, **links, **dict.fromkeys(_COSTS, 0.0), memory=10**15
    )


def _knobs(machine: Machine, workers: int) -> dict[str, Callable[[float, Machine], Machine]]:
    """For each constant that is fitted: sets it, so many times slower than `machine` has it, in another machine."""

    def of_rows(name: str) -> Callable[[float, Machine], Machine]:
        rates = getattr(machine, name)
        return lambda times, into: _with(into, **{name: {k: v / times for k, v in rates.items()}})

    def of_rate(name: str) -> Callable[[float, Machine], Machine]:
        return lambda times, into: _with(into, **{name: getattr(machine, name) / times})

    def of_cost(name: str) -> Callable[[float, Machine], Machine]:
        return lambda times, into: _with(into, **{name: max(getattr(machine, name), 1e-7) * times})

    def bandwidth(times: float, into: Machine) -> Machine:
        link = Link(getattr(into, place).latency, getattr(machine, place).bandwidth / times)
        return _with(into, **{place: link})

    def latency(times: float, into: Machine) -> Machine:
        link = Link(getattr(machine, place).latency * times, getattr(into, place).bandwidth)
        return _with(into, **{place: link})

    knobs: dict[str, Any] = {name: of_rows(name) for name in ("gather", "update")}
    knobs |= {name: of_rate(name) for name in _RATES} | {name: of_cost(name) for name in _COSTS}
    if workers == 1:
        del knobs["per_piece"]
    else:
        place = "between" if machine.measured.get("hosts", 1) > 1 else "within"
        knobs |= {"bandwidth": bandwidth, "latency": latency}
    return knobs


def _predicted(shape: Shape, workers: int, machine: Machine) -> float:
    return plan(shape.model(), workers, batch=shape.batch, machine=machine, strategy=shape.kind).step_ms


def stretched(shares: np.ndarray, held: np.ndarray) -> np.ndarray:
    """By how much each constant is stretched for every row of `shares` to add up to 1, as nearly as they can.

    Args:
        shares: [steps, constants] of the measured time of a step, predicted for each constant.
        held: [constants] whether one is held to what it was, and within a twentieth and twenty times of it.

    Returns:
        [constants] factors, none below 0.

    Example:
        >>> stretched(np.array([[0.5, 0.0], [0.0, 2.0]]), np.array([False, False]))
        array([2. , 0.5])
    """
    weights = np.where(held, _HOLD, 1e-9)
    square = shares.T @ shares + np.diag(weights)
    target = shares.sum(axis=0) + weights
    low, high = np.where(held, 0.05, 0.0), np.where(held, 20.0, np.inf)
    found = np.ones(len(target))
    for _ in range(_ROUNDS):
        for i in range(len(found)):
            found[i] = np.clip(found[i] + (target[i] - square[i] @ found) / square[i, i], low[i], high[i])
    return found
