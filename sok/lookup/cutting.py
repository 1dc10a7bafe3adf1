"""Cuts a call that a function makes at its lookups, so that those which do not depend on each other become one.

A model that was built layer by layer looks up layer by layer. Here its call is built twice. The first time in a graph
that nobody runs, which tells what is looked up. Ops that lead to ids are then copied from there, and all ids are looked
up at once. The second time, in the function itself, each lookup finds its rows. What a lookup returns, and what it is
differentiated to, stays what it was.

A lookup stays where it is if its ids come from an op with a state (a random number, a variable, a py_function), from
another lookup, or from inside a tf.cond, a loop or a function; if it has weights; and if `training` is not known.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from sok.base import _ops, graph_ops
from sok.base.autograph import converting
from sok.base.patching import Here
from sok.job.job import job_of
from sok.lookup import lookup
from sok.lookup.feature import Csr, Feature, by_device

_T = TypeVar("_T")


@dataclasses.dataclass
class _Asked:
    """One call of `lookup_parts`, as the first building has it; `found` if it is done together with others."""

    parts: list[list[Feature]]  # ids are Csr, in the graph that nobody runs
    insert: bool | None
    found: list[list[tf.Tensor]] | None = None

    @property
    def features(self) -> list[Feature]:
        return [f for part in self.parts for f in part]

    @property
    def kind(self) -> list[tuple[Any, str]]:
        return [(f.table, f.combiner) for f in self.features]


_graph = Here()  # in which lookups are met


def grouped(call: Callable[[], _T]) -> _T:
    """What `call()` returns, with its lookups in tables made together as far as they do not depend on each other.

    In a graph of a `tf.function` alone; executing eagerly, in a v1 graph and while a model is exported, it is `call()`.
    Python code of `call` runs twice while a function is traced. Collective as the lookups are.

    Raises:
        RuntimeError: the second building looks up something else than the first.

    Example:
        >>> import sok
        >>> a, b = (sok.EmbeddingVariable(1, 10, name=f"cut_{name}", initializer="ones") for name in "ab")
        >>> step = tf.function(lambda i: grouped(lambda: lookup.lookup_rows(a, i) + lookup.lookup_rows(b, 2 * i)))
        >>> graph = step.get_concrete_function(tf.constant([1], tf.int64)).graph
        >>> [op.type for op in graph.get_operations() if "Lookup" in op.type]
        ['Sok>GroupLookup']
        >>> step(tf.constant([1], tf.int64)).numpy().tolist()
        [[2.0]]
    """
    call = converting(call)
    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    is_v1 = not tf.compat.v1.executing_eagerly_outside_functions()
    if graph is None or is_v1 or _graph.value is graph or _ops.is_substituted():
        return call()
    asked = _ask(call)
    moved = [one for one in asked if one.insert is not None]
    if len(moved) < 2:
        return call()
    waiting = iter(asked)

    def meet(parts: Sequence[Sequence[Feature]], training: Any, names: Sequence[str] | None) -> list[list[tf.Tensor]]:
        one = next(waiting, None)
        if one is None or one.kind != [(f.table, f.combiner) for part in parts for f in part]:
            raise RuntimeError(
                "A model that is traced looks up its tables in another order each time that its `call` runs, so that "
                "its lookups cannot become one: sok.distributed_model(model, one_exchange=False) leaves them alone."
            )
        return lookup.lookup_parts(parts, training, names) if one.found is None else one.found

    _look_up_together(moved)
    with _met_in(graph, meet):
        return call()


def _ask(call: Callable[[], Any]) -> list[_Asked]:
    """What `call` looks up, built in a graph that nobody runs; then those that can be moved are in the default one."""
    scratch = tf.__internal__.FuncGraph("sok_lookups")
    asked: list[_Asked] = []

    def meet(parts: Sequence[Sequence[Feature]], training: Any, _: Any) -> list[list[tf.Tensor]]:
        one, found = lookup.look_up_apart(parts, training)
        flat = [f for part in one for f in part]
        is_simple = all(f.is_of_table and f.ids.weights is None and not f.exact for f in flat)
        is_simple = is_simple and len(by_device(flat)) == 1
        insert = tf.get_static_value(tf.convert_to_tensor(training, tf.bool)) if is_simple else None
        asked.append(_Asked(one, None if insert is None else bool(insert)))
        return found

    with scratch.as_default(), _met_in(scratch, meet):
        call()
    copy = graph_ops.Copy({inner.ref(): outer for outer, inner in scratch.captures}, scratch)
    for one in asked:
        if one.insert is not None:
            tensors = [tensor for f in one.features for tensor in (f.ids.keys, f.ids.row_splits)]
            if all(tensor is None or copy.is_pure(tensor) for tensor in tensors):
                one.parts = [[dataclasses.replace(f, ids=_copied(f.ids, copy)) for f in part] for part in one.parts]
            else:
                one.insert = None
    return asked


def _copied(ids: Csr, copy: graph_ops.Copy) -> Csr:
    row_splits = None if ids.row_splits is None else copy.tensor(ids.row_splits)
    return dataclasses.replace(ids, keys=copy.tensor(ids.keys), row_splits=row_splits)


def _look_up_together(asked: Sequence[_Asked]) -> None:
    groups: dict[Any, list[_Asked]] = {}
    for one in asked:
        tables = [f.table for f in one.features]
        groups.setdefault((one.insert, job_of(tables), tables[0].handle.device), []).append(one)
    for (insert, *_), members in groups.items():
        if len(members) > 1:
            features = [f for one in members for f in one.features]
            for f in features:
                if f.seen is not None:
                    f.seen(f.ids.keys, f.ids.row_splits)
            with tf.name_scope("lookups"):
                found = iter(lookup.lookup_parts([features], insert)[0])
            for one in members:
                one.found = [[next(found) for _ in part] for part in one.parts]


@contextlib.contextmanager
def _met_in(graph: Any, meet: Callable[..., list[list[tf.Tensor]]]) -> Iterator[None]:
    """Inside, lookups that are built in `graph` are `meet`; those of other graphs (loops, functions) as ever."""
    with _graph.inside(graph), lookup.met_by(lambda: tf.compat.v1.get_default_graph() is graph, meet):
        yield
