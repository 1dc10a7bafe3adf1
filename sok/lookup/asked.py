"""What a function looks up, found by building it in a graph that nobody runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok.base.autograph import converting
from sok.lookup import lookup
from sok.lookup.feature import Feature


@dataclasses.dataclass
class Asked:
    """One call of `lookup_parts` by `lookup_fn`."""

    parts: list[list[Feature]]  # their ids are Csr, of the graph that nobody runs
    insert: bool | None
    why_not: str = ""  # it stays in its step; empty: it goes ahead

    @property
    def features(self) -> list[Feature]:
        return [f for part in self.parts for f in part]

    @property
    def kinds(self) -> list[Any]:
        return [kind_of(f) for f in self.features]


def kind_of(f: Feature) -> tuple[Any, ...]:
    return id(f.table), f.combiner, f.dtype, f.slot_num


@dataclasses.dataclass
class Scratch:
    graph: Any
    leaves: list[tf.Tensor]
    asked: list[Asked]
    nested: list[Asked]  # in loops, branches and functions


def ask(spec: object, leaves: Sequence[tf.TensorSpec], lookup_fn: Callable[[Any], Any]) -> Scratch:
    """What `lookup_fn` looks up, built in a graph that nobody runs."""
    made: list[Scratch] = []

    def build(*leaves: tf.Tensor) -> None:
        scratch = Scratch(tf.compat.v1.get_default_graph(), list(leaves), [], [])
        made.append(scratch)

        def is_here() -> bool:
            graph = tf.compat.v1.get_default_graph()
            while graph is not None and graph is not scratch.graph:
                graph = getattr(graph, "outer_graph", None)
            return graph is not None

        def meet(parts: Sequence[Sequence[Feature]], training: Any, _: Any) -> list[list[tf.Tensor]]:
            one, found = lookup.look_up_apart(parts, training)
            insert = tf.get_static_value(tf.convert_to_tensor(training, tf.bool))
            is_nested = tf.compat.v1.get_default_graph() is not scratch.graph
            list_of = scratch.nested if is_nested else scratch.asked
            list_of.append(Asked(one, None if insert is None else bool(insert)))
            return found

        with lookup.met_by(is_here, meet):
            converting(lookup_fn)(tf.nest.pack_sequence_as(spec, leaves, expand_composites=True))

    tf.function(build).get_concrete_function(*(tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves))
    return made[-1]
