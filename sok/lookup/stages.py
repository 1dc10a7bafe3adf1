"""Inputs of a v1 graph that come through a stage, and the lookups that may begin ahead of their step because of it.

The outputs of a stage are placeholders: who runs the graph gives them a batch that was read before
(`sok.lookup.session_plan`). A lookup whose ids come from such a batch, by ops without a state, is built in two halves
as every lookup is; its first half can be run by itself, ahead of the step, and what came of it be fed in the step. A
run that feeds nothing of it is the synchronous lookup.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from sok.base import graph_ops
from sok.base.types import Training
from sok.lookup import exchange
from sok.lookup.feature import Feature, Group
from sok.lookup.schedule import Schedule, next_number

_BATCHES = 4  # that are ahead, as far as a graph knows: the session says how many
_STAGES = "_sok_stages"  # what a graph calls them: they end with it


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the batches of a stage come from."""

    tensors: list[tf.Tensor]  # whose values are a batch, in the order of the stage's outputs
    capacity: int = 1  # how many batches are kept
    threads: int = 1  # that read them
    given: tuple[tuple[Any, tf.Tensor], ...] | None = None  # what to feed there, and the tensors whose values that are
    generator: Iterator[dict[Any, Any]] | None = None  # of what to feed there besides
    closing: tuple[type[BaseException], ...] = (tf.errors.OutOfRangeError, StopIteration)  # by which the data end
    ignored: tuple[type[BaseException], ...] = ()  # after which the next batch is read
    options: Any = None  # of the runs that read


class Stage:
    """What a graph takes in as one batch.

    Args:
        spec: of the batch, in any structure.
        source: where the batches come from.
        schedule: what travels ahead, if anything does. How far ahead says who runs the graph.
        name: of its placeholders.
    """

    def __init__(self, spec: object, source: Source, schedule: Schedule, name: str) -> None:
        v1 = tf.compat.v1
        self.spec, self.source, self.name, self._schedule, self.number = spec, source, name, schedule, next_number()
        leaves, graph = tf.nest.flatten(spec, expand_composites=True), v1.get_default_graph()
        with v1.name_scope(f"{name}_needs_make_prefetch_hook"):  # found in the error where nobody feeds them
            self.outputs = [v1.placeholder(leaf.dtype, leaf.shape) for leaf in leaves]
            self.batch_number = v1.placeholder_with_default(tf.constant(0, tf.int64), [])
            self.has_ended = v1.placeholder_with_default(False, [])
            # One of the graph: who builds the loss does not know which stage's lookups go ahead.
            self.weight: tf.Tensor = (
                of_graph(graph)[0].weight if of_graph(graph) else v1.placeholder_with_default(1.0, [])
            )
        self.turn = threading.Lock()  # of the source's generator, which goes on in one thread at a time
        self.user: Any = None  # a weak reference to what begins its lookups
        self.readings = itertools.count(1)  # of its batches, by all sessions of the graph
        self.lookups: list[exchange.Sent] = []  # the first halves that can be run by themselves
        self.reads: list[tf.Operation] = []  # what is to run with them
        self.tables: list[Any] = []  # of these
        self.stay: dict[str, str] = {}  # why lookups of a table are made in their step
        given = {output.ref(): output for output in self.outputs}
        self._copy = graph_ops.Copy(given, graph)
        setattr(graph, _STAGES, [*of_graph(graph), self])

    @property
    def batch(self) -> Any:
        """The batch, in the structure of `spec`."""
        return tf.nest.pack_sequence_as(self.spec, self.outputs, expand_composites=True)

    @property
    def as_ahead(self) -> exchange.Ahead:
        """As what the keys of its lookups travel."""
        rows, is_stale = self._schedule.sends_rows, self._schedule.stale is not None
        name = f"ahead{self.number}"
        return exchange.Ahead(name, self.batch_number, self.has_ended, rows, is_stale, _BATCHES, self.reads)

    def check_depth(self, depth: int) -> None:
        """`ValueError` if rows could be older than `stale`, where lookups begin `depth` batches before their turn."""
        dataclasses.replace(self._schedule, depth=depth)

    def leads_to_lookups(self) -> set[str]:
        """The names of all tensors of which its lookups are made, that can be run by themselves."""
        found: set[str] = set()
        waiting = [tensor for sent in self.lookups for tensor in [*(sent.said or ()), *sent.index, sent.asked]]
        while waiting:
            tensor = waiting.pop()
            if tensor.name not in found:
                found.add(tensor.name)
                waiting += tensor.op.inputs
        return found

    def is_source_of(self, features: Sequence[Feature]) -> bool:
        """Whether all ids and weights are calculated from the batch alone."""
        tensors = [t for f in features for t in (f.ids.keys, f.ids.row_splits, f.ids.weights) if t is not None]
        return all(map(self._copy.is_pure, tensors)) and any(map(self._is_reached_from, tensors))

    def _is_reached_from(self, tensor: tf.Tensor) -> bool:
        """Of pure tensors: whether one needs the batch, and is not a constant."""
        mine, seen, waiting = {output.op for output in self.outputs}, set(), [tensor.op]
        while waiting:
            op = waiting.pop()
            if op in mine:
                return True
            if op not in seen:
                seen.add(op)
                waiting += [t.op for t in op.inputs]
        return False

    def note(self, features: Sequence[Feature], sent: exchange.Sent | None) -> None:
        """A lookup that was begun by `as_ahead`."""
        if sent is not None:
            self.lookups.append(sent)
            self.tables += [f.table for f in features]


def of_graph(graph: tf.Graph) -> list[Stage]:
    """The stages of a v1 graph, in the order in which they were made."""
    return getattr(graph, _STAGES, [])


def stage_of(features: Sequence[Feature], training: Training) -> Stage | None:
    """The stage from whose batches the ids of these features come, if their lookup may begin ahead of its step.

    Features of tables, whose ids are Csr, in the graph that is being built.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        return None
    graph = inside = tf.compat.v1.get_default_graph()
    while not of_graph(inside) and getattr(inside, "outer_graph", None) is not None:
        inside = inside.outer_graph
    found = of_graph(inside)
    if not found or (Group.of(features).is_alone and all(not f.table.options.has_file for f in features)):
        return None
    stage, why = None, ""
    if inside is not graph or graph._get_control_flow_context() is not None:
        why = "it lies in a loop, a branch or a function of its own"
    elif features[0].table.on_servers is not None:
        why = "its rows are on parameter servers"
    elif tf.get_static_value(tf.convert_to_tensor(training, tf.bool)) is None:
        why = "its `training` is a tensor"
    else:
        stage = next((one for one in found if one.is_source_of(features)), None)
        why = "its ids do not come from the batch of one stage alone, by ops without a state"
    if stage is None:
        found[0].stay.setdefault(features[0].table.table_name, why)
    return stage
