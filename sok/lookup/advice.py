"""Says once that a training step makes many lookups one by one, each with an exchange of its own between workers."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import tensorflow as tf

from sok.base import log
from sok.job import context
from sok.lookup.feature import Group

# A few are a design (a user, an item and a context table); a layer for each of a model's columns is more than this.
FEW = 7
_NAMED = 4

_has_spoken = False


@dataclasses.dataclass
class Step:
    """The lookups that a step has made, or a function that is traced, before their gradients."""

    tables: list[str] = dataclasses.field(default_factory=list)
    is_over: bool = False

    def end(self, workers: int) -> None:
        """Called where gradients begin: all lookups of the step are known by then."""
        global _has_spoken
        if self.is_over or _has_spoken:
            return
        self.is_over = True
        if len(self.tables) <= FEW or context.rank() != 0:
            return
        _has_spoken = True
        names = ", ".join(f"'{name}'" for name in list(dict.fromkeys(self.tables))[:_NAMED])
        # No warning of Python's: as an error, on this worker alone, it would leave the others waiting.
        log.logger.warning(
            "A training step makes %d lookups (%s, ...), and for each of them the %d workers meet three times. Make "
            "one lookup of all: sok.distributed_model(model) does so where a model of Keras is traced, and not with "
            "run_eagerly=True; one sok.DistributedEmbedding with as many slots (slot_num, distinct_slots=True) where "
            "the columns have one width, else sok.group_embedding_lookup_sparse of their tables, or "
            "sok.group_embedding_column_scope() around feature columns (docs/group_lookup.md). What each lookup "
            "costs: with sok.trace() as t: ...; print(t).",
            len(self.tables),
            names,
            workers,
        )


_eager = Step()
_of_graph: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()


def counted(group: Group) -> Step:
    """The step that is under way, or under construction, to which a lookup of the group has been added."""
    global _eager
    name = group.tables[0].table_name
    if _has_spoken:
        return _eager
    if tf.executing_eagerly():
        if _eager.is_over or name in _eager.tables:  # of the step before, or of an evaluation
            _eager = Step()
        step = _eager
    else:
        step = _of_graph.setdefault(context.counting_graph(), Step())
    step.tables.append(name)
    return step
