"""The update rules: a declaration each in a file of its own, a line each in the list. Known without TensorFlow."""

from __future__ import annotations

from sok.table.rules.adagrad import ADAGRAD
from sok.table.rules.adam import ADAM
from sok.table.rules.lazy_adam import LAZY_ADAM
from sok.table.rules.rule import Hyper, RowRule, Slot, Stock
from sok.table.rules.sgd import SGD

__all__ = ["RULES", "Hyper", "RowRule", "Slot", "Stock", "find"]

RULES = {rule.name: rule for rule in (SGD, ADAGRAD, LAZY_ADAM, ADAM)}
"""The rules that are compiled in, each a header of `include/sok/rules`."""


def find(name: str) -> RowRule:
    """The rule of that name; of one that this process knows by its name alone, what the name says: its slots.

    Example:
        >>> find("RMSprop(velocity,momentum)").slot_names
        ('velocity', 'momentum')
    """
    if name in RULES:
        return RULES[name]
    slots = tuple(Slot(slot) for slot in name.partition("(")[2].removesuffix(")").split(",") if slot)
    return RowRule(name, slots, counts_steps="adam" in name.lower())
