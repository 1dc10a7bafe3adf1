"""The update rules: a declaration each in a file of its own, a line each in the list. Known without TensorFlow."""

from __future__ import annotations

from sok.base import _ops
from sok.table.rules.adagrad import ADAGRAD
from sok.table.rules.adam import ADAM
from sok.table.rules.lazy_adam import LAZY_ADAM
from sok.table.rules.rule import Hyper, RowRule, Slot, Stock
from sok.table.rules.sgd import SGD

__all__ = ["RULES", "Hyper", "RowRule", "Slot", "Stock", "declare", "find", "register"]

RULES = {rule.name: rule for rule in (SGD, ADAGRAD, LAZY_ADAM, ADAM)}
"""The rules that are compiled in, each a header of `include/sok/rules`."""

_registered: dict[str, RowRule] = {}


def find(name: str) -> RowRule:
    """The rule of that name; of one that this process knows by its name alone, what the name says: its slots.

    Example:
        >>> find("RMSprop(velocity,momentum)").slot_names
        ('velocity', 'momentum')
    """
    known = RULES.get(name) or _registered.get(name)
    if known is not None:
        return known
    slots = tuple(Slot(slot) for slot in name.partition("(")[2].removesuffix(")").split(",") if slot)
    return RowRule(name, slots, counts_steps="adam" in name.lower())


def declare(rule: RowRule) -> None:
    """Makes a rule of one's own known to this process, which can then make optimizers of it."""
    _registered[rule.name] = rule


def register(rule: RowRule, function: int) -> None:
    """Registers a rule of one's own in this process, or gives it another function.

    Graphs and files hold the name of a rule: whoever trains registers it first, each process and each worker for
    itself. Files can be read, restored and exported without. Tables on GPUs refuse it.

    Args:
        rule: its name lists its slots: 'signum(m)'.
        function: the address of a C function `void (const SokRuleBlock*)`, see `include/sok/rules/own_rule.h`. It is
            called by many threads, and must stay as long as the process.

    Raises:
        ValueError: the name is none, or was registered with another layout: other slots, starts or hyperparameters.
    """
    if find(rule.name).slot_names != rule.slot_names:
        raise ValueError(f"The name of rule '{rule.name}' must list its slots: {', '.join(rule.slot_names)}.")
    starts = ",".join(slot.start if isinstance(slot.start, str) else repr(float(slot.start)) for slot in rule.slots)
    hyper = ",".join(["learning_rate", *(hyper.name for hyper in rule.hyper)])
    _ops.register_rule(rule.name, hyper, starts, function)
    declare(rule)
