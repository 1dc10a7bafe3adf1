"""Ops of one graph once more, in another; and what is made or runs at once, whatever graph is being built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf


def run_now(make: Callable[[], Any]) -> Any:
    """The values of the tensors that `make()` makes, also while a graph is being built."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.nest.map_structure(lambda tensor: tensor.numpy(), make())
    # A session of its own, with threads of its own: the first session of a process would decide those of all others.
    config = tf.compat.v1.ConfigProto(use_per_session_threads=True, device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return session.run(make())


@contextlib.contextmanager
def variables_at_once() -> Iterator[None]:
    """Inside, variables are made at once and for good, also while a `tf.function` is traced.

    Else TensorFlow makes them in the function, and traces it a second time, now that they are there. To trace a step is
    most of the time until the first has ended, and optimizers and metrics make their variables in it.
    """

    def make(creator: Callable[..., Any], **arguments: Any) -> Any:
        if tf.is_symbolic_tensor(arguments.get("initial_value")):  # which is in the function alone
            return creator(**arguments)
        with tf.init_scope():
            return creator(**{**arguments, "experimental_enable_variable_lifting": False})

    with tf.variable_creator_scope(make):
        yield


def copied(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """The same op with these inputs, in the default graph, with the functions that it calls."""
    graph = tf.compat.v1.get_default_graph()
    for attribute in op.node_def.attr.values():
        for name in [attribute.func.name, *(function.name for function in attribute.list.func)]:
            if name:
                graph._add_function_recursive(op.graph._get_function(name))
    return graph._create_op_internal(
        op.type,
        list(inputs),
        [tensor.dtype.base_dtype for tensor in op.outputs],
        name=op.name,
        attrs={name: op.node_def.attr[name] for name in op.node_def.attr if name != "_class"},
        op_def=op.op_def,
    )


class Copy:
    """Copies tensors of `graph` into the default one, with all that leads to them.

    Args:
        given: what stands in the default graph for tensors of the other, by their `ref()`.
    """

    def __init__(self, given: Mapping[Any, tf.Tensor], graph: tf.Graph) -> None:
        self._made = dict(given)
        self._graph = graph
        self._is_pure: dict[tf.Operation, bool] = {}

    def is_pure(self, tensor: tf.Tensor) -> bool:
        """Whether it may be computed at another place: by ops without a state, from what is given."""
        if self._is_there(tensor):
            return True
        for op in self._in_order(tensor):
            if op not in self._is_pure:
                is_alone = not (op.op_def.is_stateful or op.control_inputs or op.type.startswith("Placeholder"))
                inputs = (self._is_there(t) or self._is_pure.get(t.op, False) for t in op.inputs)
                self._is_pure[op] = is_alone and all(inputs)
        return self._is_pure[tensor.op]

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """What stands for it in the default graph."""
        if not self._is_there(tensor):
            for op in self._in_order(tensor):
                if any(output.ref() not in self._made for output in op.outputs):
                    with tf.name_scope(""), tf.device(op.device):
                        new = copied(op, [self._of(t) for t in op.inputs])
                    self._made |= {old.ref(): made for old, made in zip(op.outputs, new.outputs, strict=True)}
        return self._of(tensor)

    def _is_there(self, tensor: tf.Tensor) -> bool:
        return getattr(tensor, "graph", None) is not self._graph or tensor.ref() in self._made

    def _of(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._made.get(tensor.ref(), tensor)

    def _in_order(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """The ops that lead to a tensor, each after those that it needs."""
        ordered: dict[tf.Operation, None] = {}
        waiting, seen = [tensor.op], set()
        while waiting:  # not by recursion: graphs are deeper than Python's stack
            op = waiting[-1]
            missing = [] if op in seen else [t.op for t in op.inputs if not self._is_there(t) and t.op not in seen]
            seen.add(op)
            if missing:
                waiting += missing
            else:
                waiting.pop()
                ordered.setdefault(op)
        return list(ordered)
