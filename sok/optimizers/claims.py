"""Which optimizers train which tables, so that slots from a file find theirs."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.table import on_servers, reading, rules
from sok.table.table import EmbeddingVariable

if TYPE_CHECKING:
    from sok.optimizers import Optimizer


@dataclasses.dataclass(frozen=True)
class SavedSlots:
    """A slot set as it was saved."""

    name: str
    rule: str
    iterations: int | None = None  # of its optimizer, if that is known


def _known(table: Any) -> list[Any]:
    # In the table and not beside it: optimizers hold on to their graph, and that to its tables.
    return vars(table).setdefault("_optimizers", [])


def _waiting(table: Any) -> dict[str, SavedSlots]:
    """Slots that a file has left for an optimizer that has not been seen yet."""
    return vars(table).setdefault("_unclaimed_slots", {})


def optimizers_of(tables: Iterable[Any]) -> list[Any]:
    """The optimizers that have been built for, or have updated, any of these tables, ordered by their names."""
    found = {id(optimizer): optimizer for table in tables for optimizer in _known(table)}
    return sorted(found.values(), key=lambda optimizer: optimizer.slot_set)


def tables_of(optimizer: Optimizer) -> list[Any]:
    """The tables that the optimizer has been built for, or has updated, ordered by their names."""
    return sorted(vars(optimizer).get("_tables_trained", ()), key=lambda table: table.table_name)


def claim(optimizer: Optimizer, table: EmbeddingVariable) -> None:
    """Notes that `optimizer` trains `table`. The first time, it takes slots over that a file has left for it.

    Raises:
        ValueError: another one of the same name does, which has taken it over from a file for another table, say: they
            would share their slots.
    """
    known = _known(table)
    if any(other is optimizer for other in known):
        return
    _refuse_cut_rows(optimizer, table)
    if optimizer.source is not None:
        rule = f"Optimizer '{optimizer.slot_set}', whose rule is compiled in this process and not on the servers,"
        on_servers.refuse(table, rule, "Take one of sok.optimizers.")
    waiting = _waiting(table)
    names = {other.slot_set for other in known}
    fitting = [slots for slots in waiting.values() if slots.rule == optimizer.rule and slots.name not in names]
    is_new = "_tables_trained" not in vars(optimizer)
    if optimizer.slot_set in names:
        raise ValueError(
            f"Two optimizers named '{optimizer.slot_set}' would share their slots in table '{table.table_name}': one "
            "has taken over what the other had saved. Train the table with one of them."
        )
    if is_new and optimizer.slot_set not in waiting and len(fitting) == 1:
        # The optimizer that made them had another name: it was another one of the same process, say.
        optimizer._slot_set = fitting[0].name
    taken = waiting.pop(optimizer.slot_set, None)
    if is_new and taken is not None and taken.iterations is not None:
        with tf.init_scope():
            optimizer.iterations.assign(taken.iterations)
    known.append(optimizer)
    reading.note_trained(table)
    optimizer.__dict__.setdefault("_tables_trained", weakref.WeakSet()).add(table)


def _refuse_cut_rows(optimizer: Any, table: Any) -> None:
    """`ValueError` if the optimizer must see whole rows, and each worker has some columns of them."""
    if not table.placement.cuts_rows:
        return
    why = ""
    if rules.find(optimizer.rule).needs_whole_row:
        why = "by whose rule the step of a weight depends on the others of its row"
    elif optimizer.nonfinite_gradients == "skip":
        why = "which leaves rows out that are not finite (nonfinite_gradients='skip')"
    if why:
        raise ValueError(
            f"Optimizer '{optimizer.slot_set}' ({type(optimizer).__name__}), {why}, cannot train table "
            f"'{table.table_name}', whose rows are cut: {table.placement}. Give the table another placement, or take "
            "another optimizer."
        )


def names_here(table: EmbeddingVariable, saved: Sequence[SavedSlots]) -> dict[str, str]:
    """What saved slot sets are to be called in `table`: as its optimizer of the same rule, if there is one such."""
    names = {slots.name: slots.name for slots in saved}
    known = {optimizer.slot_set: optimizer for optimizer in _known(table)}
    for rule in {slots.rule for slots in saved}:
        without = [slots for slots in saved if slots.rule == rule and slots.name not in known]
        looking = [name for name, optimizer in known.items() if optimizer.rule == rule and name not in names]
        if len(without) == len(looking) == 1:
            names[without[0].name] = looking[0]
    return names


def restored(table: EmbeddingVariable, saved: Sequence[SavedSlots], names: dict[str, str]) -> None:
    """Gives the step counts of restored slots to the table's optimizers, or keeps them for those that come later."""
    known = {optimizer.slot_set: optimizer for optimizer in _known(table)}
    waiting = _waiting(table)
    waiting.clear()
    for slots in saved:
        optimizer = known.get(names[slots.name])
        if optimizer is None:
            waiting[slots.name] = slots
        elif slots.iterations is not None:
            optimizer.iterations.assign(slots.iterations)
