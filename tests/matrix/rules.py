"""Rules that train tables: how users make the optimizer, and what NumPy says that a step does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import sok
from tests.matrix import own_rule
from tests.reference import optimizers as reference
from tests.reference.rules import STEPS
from tests.sok import own_rules

RATE, EPSILON, BETAS, MOMENTUM, ACCUMULATOR, TOTAL = 0.1, 1e-7, (0.9, 0.999), 0.9, 0.1, 0.5

State = tuple[np.ndarray, ...]
# (rows [n, D], slots, gradients [n, D] with zeros in untouched rows, touched [n], step from 1) -> (rows, slots)
Step = Callable[[np.ndarray, State, np.ndarray, np.ndarray, int], tuple[np.ndarray, State]]


def _sgd(rows: np.ndarray, slots: State, grads: np.ndarray, touched: np.ndarray, step: int) -> tuple:
    return reference.sgd(rows, grads, RATE), slots


def _adagrad(rows: np.ndarray, slots: State, grads: np.ndarray, touched: np.ndarray, step: int) -> tuple:
    new, accumulator = reference.adagrad(rows, *slots, grads, RATE, EPSILON)
    return new, (accumulator,)


def _adam(rows: np.ndarray, slots: State, grads: np.ndarray, touched: np.ndarray, step: int) -> tuple:
    new, *moments = reference.adam(rows, *slots, grads, RATE, *BETAS, EPSILON, step)
    return new, tuple(moments)


def _lazy_adam(rows: np.ndarray, slots: State, grads: np.ndarray, touched: np.ndarray, step: int) -> tuple:
    new, *moments = reference.lazy_adam(rows, *slots, grads, touched, RATE, *BETAS, EPSILON, step)
    return new, tuple(moments)


def _nadam(rows: np.ndarray, slots: State, grads: np.ndarray, touched: np.ndarray, step: int) -> tuple:
    hyper = {"learning_rate": RATE, "beta_1": BETAS[0], "beta_2": BETAS[1], "epsilon": EPSILON, "schedule_decay": 1.0}
    return STEPS["nadam"](rows, slots, grads, hyper, step)


def _momentum(rows: np.ndarray, slots: State, grads: np.ndarray, touched: np.ndarray, step: int) -> tuple:
    (before,) = slots
    velocity = np.where(touched[:, None], MOMENTUM * before - RATE * grads, before)
    return np.where(touched[:, None], rows + velocity, rows), (velocity,)


def _damped(rows: np.ndarray, slots: State, grads: np.ndarray, touched: np.ndarray, step: int) -> tuple:
    before = (rows, *slots)
    new, *of_slots = (
        np.where(touched[:, None], after, was)
        for after, was in zip(own_rule.damped(*before, grads, RATE, MOMENTUM), before, strict=True)
    )
    return new, tuple(of_slots)


@dataclasses.dataclass(frozen=True)
class Rule:
    make: Callable[[], Any]
    step: Step
    slots: tuple[float, ...] = ()  # what each holds of a fresh row
    averages: bool = False  # over workers; else gradients are added
    by_row: bool = False  # it sees whole rows, and so trains none that are cut


RULES = {
    "SGD": Rule(lambda: sok.optimizers.SGD(RATE), _sgd),
    "Adagrad": Rule(
        lambda: sok.optimizers.Adagrad(RATE, initial_accumulator_value=ACCUMULATOR, epsilon=EPSILON),
        _adagrad,
        (ACCUMULATOR,),
    ),
    "Adam": Rule(lambda: sok.optimizers.Adam(RATE), _adam, (0.0, 0.0)),
    "Nadam": Rule(lambda: sok.optimizers.Nadam(RATE), _nadam, (0.0, 0.0)),
    "LazyAdam": Rule(lambda: sok.optimizers.LazyAdam(RATE), _lazy_adam, (0.0, 0.0)),
    "rule in Python": Rule(lambda: own_rules.adagrad(RATE, epsilon=EPSILON), _adagrad, (ACCUMULATOR,), by_row=True),
    "own rule": Rule(lambda: own_rule.Damped(RATE, MOMENTUM, TOTAL), _damped, (0.0, TOTAL)),
    "wrapped Adam": Rule(lambda: sok.OptimizerWrapper(keras.optimizers.Adam(RATE)), _lazy_adam, (0.0, 0.0)),
    "wrapped momentum": Rule(
        lambda: sok.OptimizerWrapper(keras.optimizers.SGD(RATE, momentum=MOMENTUM)), _momentum, (0.0,)
    ),
    "distributed Adam": Rule(
        lambda: sok.DistributedOptimizer(keras.optimizers.Adam(RATE)), _adam, (0.0, 0.0), averages=True
    ),
}


class Judge:
    """All rows of a kind's pool of keys, trained by NumPy in float64.

    With an admission by counts, and an eviction by age: `tests/sok/test_policies.py` has the others.
    """

    def __init__(
        self,
        rule: Rule,
        keys: np.ndarray,
        rows: np.ndarray,
        erased: float | None = None,
        admission: sok.Admission | None = None,
        eviction: sok.Eviction | None = None,
    ) -> None:
        self._rule, self.keys = rule, keys
        self._after = 1 if admission is None or admission.after is None else admission.after
        self._eviction = eviction
        self.counts: dict[int, int] = {}  # steps that held a key, and the last of them, while it waits or has a row
        self.lasts: dict[int, int] = {}
        self.updates = 0  # of the table, as `steps` of the optimizer
        self._places = {int(key): place for place, key in enumerate(keys)}
        self.rows, self.steps = rows.astype(np.float64), 0
        self._erased = self.rows.copy() if erased is None else np.full(rows.shape, erased)
        self.seen: set[int] = set()  # keys that have a row
        self._slots = tuple(np.full(rows.shape, value) for value in rule.slots)

    def train(self, batches: list[np.ndarray]) -> None:
        """A step whose loss is half the squared distance from 1 of each row that a worker looks up, added up."""
        counts = np.zeros(len(self.keys))
        self.look_up(np.concatenate(batches))
        for keys in batches:
            keys = [int(key) for key in keys if int(key) in self.seen]
            np.add.at(counts, [self._places[key] for key in keys], 1 / (len(batches) if self._rule.averages else 1))
        self.steps += 1
        self.rows, self._slots = self._rule.step(
            self.rows, self._slots, counts[:, None] * (self.rows - 1), counts > 0, self.steps
        )
        self.updates += 1
        if self._eviction is not None and self.updates % self._eviction.every == 0:
            self._evict(self._eviction.older_than)

    def look_up(self, keys: np.ndarray) -> None:
        """What a lookup for training admits: once in a step."""
        for key in {int(key) for key in keys}:
            self.counts[key] = self.counts.get(key, 0) + (self.lasts.get(key) != self.updates + 1)
            self.lasts[key] = self.updates + 1
            if self.counts[key] >= self._after:
                self.seen.add(key)

    def _evict(self, older_than: int) -> None:
        for key in self.seen:  # rows that were stored age from now on
            self.lasts.setdefault(key, self.updates)
        self.forget(np.array([key for key, last in self.lasts.items() if self.updates - last >= older_than], object))

    def forget(self, keys: np.ndarray) -> None:
        """Erased rows are fresh again."""
        self.seen -= {int(key) for key in keys}
        for key in map(int, keys):
            self.counts.pop(key, None), self.lasts.pop(key, None)
        for place in (self._places[int(key)] for key in keys):
            self.rows[place] = self._erased[place]
            for slot, value in zip(self._slots, self._rule.slots, strict=True):
                slot[place] = value

    def store(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.seen |= {int(key) for key in keys}
        self.rows[[self._places[int(key)] for key in keys]] = rows

    def restart(self) -> None:
        """Another optimizer goes on with the rows."""
        self.steps = 0
        for slot, value in zip(self._slots, self._rule.slots, strict=True):
            slot[:] = value

    def of(self, keys: Any) -> np.ndarray:
        return self.rows[[self._places[int(key)] for key in keys]]
