"""What OpenEmbedding's optimizers keep of each row, and which slots of ours mean the same.

A state is numbers behind each other, of the dtype of rows: vectors as long as the row, then single numbers.

Source: `train_init` and `update` of the classes in EmbeddingOptimizer.h of 4paradigm/OpenEmbedding 1e540f5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sok.compat.formats.columns import Column, FormatError


@dataclass(frozen=True)
class State:
    """The names of what an optimizer keeps, in order."""

    vectors: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

    def floats(self, dim: int) -> int:
        return len(self.vectors) * dim + len(self.scalars)

    def place(self, name: str, dim: int) -> slice:
        if name in self.vectors:
            first = self.vectors.index(name) * dim
            return slice(first, first + dim)
        first = len(self.vectors) * dim + self.scalars.index(name)
        return slice(first, first + 1)


STATES = {
    "default": State(),  # before an optimizer is set: rows are not trained
    "sgd": State(("moment",)),
    "adagrad": State(("accum",)),
    "adam": State(("m", "v"), ("beta_1_power", "beta_2_power")),
    "adamax": State(("m", "v"), ("beta_1_power",)),
    "adadelta": State(("accum", "accum_update")),
    "rmsprop": State(("accum", "moment")),
    "ftrl": State(("accum", "linear")),
}

# By OpenEmbedding's optimizer, then by our rule: which of its states each of our slots holds. Lazy forms have the same.
# A bias that is corrected by the optimizer's steps, and not by those of a row, is another state. The last rule of each
# keeps all of them.
_SAME: dict[str, dict[str, dict[str, str]]] = {
    "sgd": {"sgd": {}, "momentum": {"momentum": "-moment"}},  # it is subtracted from weights there, and added here
    "adagrad": {"adagrad": {"accumulator": "accum"}},
    "adam": {"lazy_adam_by_row": {"m": "m", "v": "v", "count": "steps"}},
    "adamax": {"lazy_adamax_by_row": {"m": "m", "v": "v", "count": "steps"}},
    "adadelta": {"adadelta": {"accum_grad": "accum", "accum_var": "accum_update"}},
    "rmsprop": {
        "rmsprop": {"velocity": "accum"},
        "rmsprop_momentum": {"velocity": "accum", "momentum": "moment"},
    },
    "ftrl": {"ftrl": {"accumulator": "accum", "linear": "linear"}},
}


def same_slots(optimizer: str, rule: str) -> dict[str, str] | None:
    """Of each slot of our rule what it is there; None: they are not the same states."""
    rules = _SAME.get(optimizer, {})
    return rules.get(rule, rules.get(rule.removeprefix("lazy_")))


def rule_of(optimizer: str) -> str | None:
    """The rule here that keeps all states of an optimizer there; None: there is none."""
    return next(reversed(_SAME.get(optimizer, {})), None)


def why_not(optimizer: str, hyper: Mapping[str, str], rule: str, options: Mapping[str, float]) -> str:
    """Why the states of an optimizer there cannot go on by a rule here; empty: they can.

    Args:
        optimizer, hyper: what the file says.
        rule, options: ours, and its hyperparameters.
    """
    if same_slots(optimizer, rule) is None:
        return f"the state of its '{optimizer}' is not that of '{rule}' here"
    if rule == "sgd" and number(hyper, "momentum", 0.0):
        return "its SGD has momentum, and that here has none"
    if optimizer == "sgd" and options.get("rate_in_velocity", 1.0) == 0.0:
        return "its SGD keeps steps, and that here gradients (rate_in_velocity=False)"
    return ""


def number(hyper: Mapping[str, str], name: str, default: float) -> float:
    """A hyperparameter of the file; `default`, OpenEmbedding's own, where that does not say it as a number."""
    try:
        return float(hyper[name])
    except (KeyError, ValueError):
        return default


class StateReader:
    """Reads states, and keeps those that it has read last: one slot after the other asks for its part of them."""

    def __init__(self, states: Column) -> None:
        self.states = states
        self._last: tuple[tuple[int, int], np.ndarray] | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        if self._last is None or self._last[0] != (start, stop):
            self._last = (start, stop), self.states.read(start, stop)
        return self._last[1]


@dataclass(frozen=True)
class SlotColumn:
    """A part of the state of each row: [n, width].

    Args:
        reader: of the states of the table.
        part: of a state.
        convert: from that part to what it is here; None: it is the same.
    """

    reader: StateReader
    part: slice
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    is_scalar: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.states.shape[0], 1 if self.is_scalar else self.part.stop - self.part.start

    @property
    def dtype(self) -> np.dtype:
        return self.reader.states.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        found = self.reader.read(start, stop)[:, self.part]
        if self.convert is None:
            return found
        try:
            return self.convert(found)
        except _NotAState as error:
            row = start + error.row
            raise FormatError(f"{self.reader.states.place(row)}: holds {error.words}.") from None

    def place(self, row: int) -> str:
        return self.reader.states.place(row)


class _NotAState(Exception):
    def __init__(self, row: int, words: str) -> None:
        super().__init__(words)
        self.row, self.words = row, words


def slots_from(optimizer: str, hyper: Mapping[str, str], rule: str, states: Column, dim: int) -> dict[str, SlotColumn]:
    """The slots of a rule whose states are the same (`same_slots`), each [n, D] or [n, 1].

    Args:
        states: [n, width].
        dim: D.
    """
    state, reader, found = STATES[optimizer], StateReader(states), {}
    for slot, name in (same_slots(optimizer, rule) or {}).items():
        if name == "steps":
            powers = slice(len(state.vectors) * dim, state.floats(dim))
            found[slot] = SlotColumn(reader, powers, _Steps(optimizer, hyper, states.dtype), is_scalar=True)
        else:
            part = state.place(name.removeprefix("-"), dim)
            found[slot] = SlotColumn(reader, part, np.negative if name.startswith("-") else None)
    return found


class _Steps:
    """How many steps a row has had, from powers of the betas: [n, 1] from [n, 1] or [n, 2].

    The power of beta_1 says it while it has not run down to nothing, then that of beta_2. Where both have, the bias is
    corrected by 1, and any number from which that is so will do.
    """

    def __init__(self, optimizer: str, hyper: Mapping[str, str], dtype: np.dtype) -> None:
        betas = [number(hyper, "beta_1", 0.9), number(hyper, "beta_2", 0.999)]
        self._betas = [float(dtype.type(beta)) for beta in betas[: len(STATES[optimizer].scalars)]]
        self._smallest = float(np.finfo(dtype).tiny)

    def __call__(self, powers: np.ndarray) -> np.ndarray:
        powers = powers.astype(np.float64)
        bad = ~((powers >= 0) & (powers <= 1)).all(1)
        if bad.any():
            row = int(np.argmax(bad))
            raise _NotAState(row, f"{powers[row].tolist()} as powers of betas, which are from 0 to 1")
        told = [beta for beta in self._betas if 0 < beta < 1]
        most = max((np.log(self._smallest) / np.log(beta) for beta in told), default=1.0)
        steps = np.where((powers == 1).all(1), 0.0, np.ceil(most))
        for column in reversed(range(len(self._betas))):
            beta, power = self._betas[column], powers[:, column]
            if 0 < beta < 1:
                lasts = power >= self._smallest
                steps[lasts] = np.rint(np.log(power[lasts]) / np.log(beta))
        return steps[:, None]
