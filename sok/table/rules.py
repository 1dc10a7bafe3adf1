"""What rules of optimizers are called, and their slots; known without TensorFlow, for those who read files."""

from __future__ import annotations

RULES = {"sgd": (), "adagrad": ("accumulator",), "lazy_adam": ("m", "v"), "adam": ("m", "v")}
"""The rules of `sok.optimizers` and the slots that each keeps for a row, every slot as long as the row."""


def slot_names(rule: str) -> tuple[str, ...]:
    """The slots of a rule: one of RULES, or that of a stock optimizer, whose name lists them.

    Example:
        >>> slot_names("RMSprop(velocity,momentum)")
        ('velocity', 'momentum')
    """
    return RULES[rule] if rule in RULES else tuple(rule.partition("(")[2].removesuffix(")").split(","))
