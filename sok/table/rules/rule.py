"""What the declaration of an update rule says. Known without TensorFlow, for those who read files."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any


def not_negative(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"`{name}` must be a finite number that is not negative. Received: {value!r}.")
    return float(value)


def decay_rate(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be a number in [0, 1). Received: {value!r}.")
    return float(value)


def flag(name: str, value: object) -> bool:
    if value not in (0, 1):
        raise ValueError(f"`{name}` must be True or False. Received: {value!r}.")
    return bool(value)


def negative(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (math.isfinite(value) and value <= 0):
        raise ValueError(f"`{name}` must be a finite number that is not positive. Received: {value!r}.")
    return float(value)


@dataclasses.dataclass(frozen=True)
class Slot:
    """What a table keeps beside each row: a vector, as long as the row, or one number.

    Attributes:
        start: what it holds of a row that no step has touched: a number, or the name of a hyperparameter.
        scalar: it is one number a row. Such slots come behind the others.
    """

    name: str
    start: float | str = 0.0
    scalar: bool = False

    def floats(self, dim: int) -> int:
        return 1 if self.scalar else dim


@dataclasses.dataclass(frozen=True)
class Hyper:
    """A hyperparameter beside the learning rate; `check(name, value)` gives it as a float, or raises ValueError."""

    name: str
    check: Callable[[str, Any], float] = not_negative


@dataclasses.dataclass(frozen=True)
class Stock:
    """A stock optimizer that does to a dense table what the rule does to ours.

    Attributes:
        classes: what it is called: 'keras.optimizers.Adam'. Exactly these classes.
        reads: of a hyperparameter the attribute that has it, its value if it is always the same one, or what gives it;
            the others are in attributes of their names.
        requires: options without which it is another rule.
        refuses: options that make it another rule.
        unlike: why this one is another rule in spite of its class; empty: it is not.
    """

    classes: tuple[str, ...]
    reads: Mapping[str, str | float | Callable[[Any], float]] = dataclasses.field(default_factory=dict)
    requires: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    unlike: Callable[[Any], str] = lambda stock: ""


@dataclasses.dataclass(frozen=True)
class RowRule:
    """How a row of a table changes by its gradient. The native half is a header of `include/sok/rules`, or registered.

    Attributes:
        name: in ops, graphs and files. That of a rule which is not compiled in lists its slots: 'signum(m;count)', with
            scalars behind ';'.
        slots: in the order of a row's record.
        hyper: in the order in which native code takes them, after the learning rate.
        decays: rows outside the batch change in each step too: they catch up when they are next read or changed.
        counts_steps: a restored optimizer needs the number of steps done: it corrects a bias by it.
        needs_whole_row: the step of a weight depends on others of its row.
        lazy: the name of the rule that does the same to the rows of the batch and leaves the others alone, if this one
            does not.
        dumped_as: what SOK v2 calls it in its files; empty: its own name, without slots.
        equals: the stock optimizers that do the same.
        formerly: what files call it that were written before it was compiled in. Their slots are the same.
        error: why these hyperparameters do not go together; empty: they do.
    """

    name: str
    slots: tuple[Slot, ...] = ()
    hyper: tuple[Hyper, ...] = ()
    decays: bool = False
    counts_steps: bool = False
    needs_whole_row: bool = False
    lazy: str = ""
    dumped_as: str = ""
    equals: tuple[Stock, ...] = ()
    formerly: tuple[str, ...] = ()
    error: Callable[[Mapping[str, float]], str] = lambda hyper: ""

    @property
    def slot_names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    def slot_widths(self, dim: int) -> tuple[int, ...]:
        """How many floats each slot has, of a row of `dim` weights."""
        return tuple(slot.floats(dim) for slot in self.slots)

    def slot_floats(self, dim: int) -> int:
        """How many floats all slots have together.

        Example:
            >>> RowRule("signum(m;count)", (Slot("m"), Slot("count", scalar=True))).slot_floats(16)
            17
        """
        return sum(self.slot_widths(dim))

    def lazily(self) -> RowRule:
        """The rule that does the same to the rows of the batch and leaves the others alone."""
        return dataclasses.replace(self, name=self.lazy, decays=False, lazy="", equals=())

    def lazily_by_row(self) -> RowRule:
        """The same, but that it counts the steps of each row, in a slot more, and corrects the row's bias by these."""
        name, slots = f"{self.lazy}_by_row", (*self.slots, Slot("count", scalar=True))
        lazy = dataclasses.replace(self.lazily(), name=name, slots=slots)
        return dataclasses.replace(lazy, counts_steps=False, dumped_as="", formerly=())
