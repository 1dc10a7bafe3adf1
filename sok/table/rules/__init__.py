"""The update rules: a declaration each in a file of its own, a line each in the list. Known without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable

from sok.base import _ops
from sok.table.rules.adadelta import ADADELTA, LAZY_ADADELTA
from sok.table.rules.adagrad import ADAGRAD
from sok.table.rules.adam import ADAM, LAZY_ADAM, LAZY_ADAM_BY_ROW
from sok.table.rules.adamax import ADAMAX, LAZY_ADAMAX, LAZY_ADAMAX_BY_ROW
from sok.table.rules.adamw import ADAMW, LAZY_ADAMW
from sok.table.rules.amsgrad import AMSGRAD, LAZY_AMSGRAD
from sok.table.rules.ftrl import FTRL
from sok.table.rules.group_ftrl import GROUP_FTRL
from sok.table.rules.lamb import LAMB
from sok.table.rules.lion import LAZY_LION, LION
from sok.table.rules.momentum import LAZY_MOMENTUM, MOMENTUM
from sok.table.rules.nadam import LAZY_NADAM, NADAM
from sok.table.rules.rmsprop import (
    LAZY_RMSPROP,
    LAZY_RMSPROP_CENTERED,
    LAZY_RMSPROP_CENTERED_MOMENTUM,
    LAZY_RMSPROP_MOMENTUM,
    RMSPROP,
    RMSPROP_CENTERED,
    RMSPROP_CENTERED_MOMENTUM,
    RMSPROP_MOMENTUM,
)
from sok.table.rules.rowwise import ROWWISE_ADAGRAD, ROWWISE_ADAM
from sok.table.rules.rule import Hyper, RowRule, Slot, Stock
from sok.table.rules.sgd import SGD
from sok.table.rules.sgdw import LAZY_SGDW, SGDW

__all__ = [
    "RULES",
    "Hyper",
    "RowRule",
    "Slot",
    "Stock",
    "declare",
    "find",
    "is_known",
    "name_now",
    "name_of",
    "register",
    "slots_of",
]

_ALL = (
    *(SGD, MOMENTUM, LAZY_MOMENTUM, ADAGRAD, ADADELTA, LAZY_ADADELTA),
    *(RMSPROP, LAZY_RMSPROP, RMSPROP_MOMENTUM, LAZY_RMSPROP_MOMENTUM),
    *(RMSPROP_CENTERED, LAZY_RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM, LAZY_RMSPROP_CENTERED_MOMENTUM),
    *(ADAM, LAZY_ADAM, AMSGRAD, LAZY_AMSGRAD, ADAMW, LAZY_ADAMW, ADAMAX, LAZY_ADAMAX, NADAM, LAZY_NADAM),
    *(LION, LAZY_LION, FTRL, SGDW, LAZY_SGDW),
    *(GROUP_FTRL, LAMB),
    *(ROWWISE_ADAGRAD, ROWWISE_ADAM, LAZY_ADAM_BY_ROW, LAZY_ADAMAX_BY_ROW),
)
RULES = {rule.name: rule for rule in _ALL}
"""The rules that are compiled in, each in a header of `include/sok/rules`."""

# What stock optimizers were called whose steps ran beside the table: those left untouched rows alone.
_FORMERLY = {old: rule.name for rule in _ALL if not rule.decays for old in rule.formerly}

_registered: dict[str, RowRule] = {}


def name_now(name: str) -> str:
    """What a rule is called now whose name a file has.

    Example:
        >>> name_now("RMSprop(velocity,momentum)"), name_now("signum(m)")
        ('lazy_rmsprop_momentum', 'signum(m)')
    """
    return _FORMERLY.get(name, name)


def find(name: str) -> RowRule:
    """The rule of that name; of one that this process knows by its name alone, what the name says: its slots.

    Example:
        >>> find("signum(m;count)").slot_names
        ('m', 'count')
    """
    known = RULES.get(name_now(name)) or _registered.get(name)
    if known is not None:
        return known
    vectors, _, scalars = name.partition("(")[2].removesuffix(")").partition(";")
    slots = tuple(
        Slot(slot, scalar=words is scalars) for words in (vectors, scalars) for slot in words.split(",") if slot
    )
    return RowRule(name, slots, counts_steps="adam" in name.lower())


def slots_of(name: str, num_slots: int) -> tuple[Slot, ...]:
    """The slots of a rule. If a newer sok has it compiled in they are not known: vectors without names."""
    known = find(name).slots
    return known if len(known) == num_slots else tuple(Slot(f"slot {k}") for k in range(num_slots))


def name_of(word: str, slots: Iterable[Slot]) -> str:
    """The name of a rule that is not compiled in.

    Example:
        >>> name_of("signum", [Slot("m"), Slot("count", scalar=True)])
        'signum(m;count)'
    """
    slots = list(slots)
    vectors, scalars = (",".join(slot.name for slot in slots if slot.scalar == kind) for kind in (False, True))
    return f"{word}({vectors}{';' if scalars else ''}{scalars})"


def is_known(name: str) -> bool:
    """Whether this process knows more of the rule than its name says."""
    return name in RULES or name in _registered


def declare(rule: RowRule) -> None:
    """Makes a rule of one's own known to this process, which can then make optimizers of it."""
    _registered[rule.name] = rule


def register(rule: RowRule, function: int, prefetches: bool = False, reads_keys: bool = False) -> None:
    """Registers a rule of one's own in this process, or gives it another function.

    Graphs and files hold the name of a rule: whoever trains registers it first, each process and each worker for
    itself. Files can be read, restored and exported without. Tables on GPUs refuse it.

    Args:
        rule: its name lists its slots: 'signum(m)', or 'signum(m;count)' where those behind ';' are one number a row.
        function: the address of a C function `void (const SokRuleBlock*)`, see `include/sok/rules/own_rule.h`. It is
            called by many threads, and must stay as long as the process.
        prefetches: it prefetches the rows of a block that it comes to; blocks are longer then.
        reads_keys: it wants the keys of rows, which a hashed table then keeps in 8 bytes more for each row.

    Raises:
        ValueError: the name is none, or was registered with another layout: other slots, starts or hyperparameters.
    """
    if rule.name != name_of(rule.name.partition("(")[0], rule.slots):
        raise ValueError(f"The name of rule '{rule.name}' must list its slots: {name_of('', rule.slots)[1:-1]}.")
    starts = ",".join(slot.start if isinstance(slot.start, str) else repr(float(slot.start)) for slot in rule.slots)
    hyper = ",".join(["learning_rate", *(hyper.name for hyper in rule.hyper)])
    _ops.register_rule(rule.name, hyper, starts, function, prefetches, reads_keys)
    declare(rule)
