"""A part of a v1 graph once more, in another graph and without ops of ours.

What signatures need is walked from their outputs back to their inputs. Our ops become what `StockOps` makes of them; an
exchange between workers becomes the lookup that it carries out, so that no collective is reached; variables become new
ones of the same names. All else is copied as it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok.base import graph_ops
from sok.saved_model.stock_ops import StockOps

_LOOPS = ("NextIteration", "Enter", "LoopCond")
_REFERENCES = ("VariableV2", "Variable")


class GraphCopy:
    """Copies tensors into the graph that is the default one when they are asked for.

    Args:
        stock: what our ops become.
        given: tensors of the old graph, and what stands for them in the new one.
    """

    def __init__(self, stock: StockOps, given: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> None:
        self._stock = stock
        self._given = {id(old): new for old, new in given}
        self._keep = given  # so that ids stay their own
        self._made: dict[tf.Operation, list[tf.Tensor]] = {}
        self._ops: dict[tf.Operation, tf.Operation] = {}
        self.variables: dict[tf.Operation, tf.Variable] = {}  # by the op of the old one

    def tensor(self, old: tf.Tensor) -> tf.Tensor:
        """What stands for a tensor of the old graph.

        Raises:
            ValueError: it depends on a placeholder that is not given, or on a loop of v1 control flow.
        """
        self._copy_all(old)
        return self._of(old)

    def initializers(self, candidates: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Those of the old graph's initializers that fill what was copied, a lookup table say, in the new graph."""
        made = []
        for op in candidates:
            if op.inputs and op.inputs[0].op in self._made:
                for tensor in op.inputs:
                    self._copy_all(tensor)
                self._same(op)
                made.append(self._ops[op])
        return made

    def _of(self, old: tf.Tensor) -> tf.Tensor:
        return self._given[id(old)] if id(old) in self._given else self._made[old.op][old.value_index]

    def _copy_all(self, wanted: tf.Tensor) -> None:
        # Not by recursion: graphs are deeper than Python's stack.
        waiting = [] if id(wanted) in self._given else [wanted.op]
        while waiting:
            op = waiting[-1]
            missing = [] if op in self._made else [o for o in self._needs(op) if o not in self._made]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if op not in self._made:
                self._made[op] = self._copied(op)

    def _needs(self, op: tf.Operation) -> list[tf.Operation]:
        if op.type in _LOOPS:
            raise ValueError(
                f"The graph cannot be exported: '{op.name}' belongs to a loop of v1 control flow. Call "
                "tf.compat.v1.enable_control_flow_v2() before the graph is made."
            )
        if op.type in ("Placeholder", "PlaceholderV2"):
            raise ValueError(f"The outputs depend on the placeholder '{op.name}', which is not one of the inputs.")
        tensors = self._inputs_of_lookup(op) if op.type == "Sok>ExchangeCombine" else op.inputs
        controls = [] if op.type.startswith("Sok>") else op.control_inputs
        return [tensor.op for tensor in tensors if id(tensor) not in self._given] + list(controls)

    def _copied(self, op: tf.Operation) -> list[tf.Tensor]:
        with tf.name_scope(""):
            if op.type == "Sok>TableHandle":
                return [op.outputs[0]]  # by which StockOps knows the table
            if op.type == "Sok>ExchangeCombine":
                return self._looked_up(op)
            if op.type.startswith("Sok>"):
                return self._said_in_stock_ops(op)
            if op.type == "VarHandleOp":
                return [self._variable(op).handle]
            if op.type in _REFERENCES:
                return [self._variable(op).read_value()]
            return self._same(op)

    def _same(self, op: tf.Operation) -> list[tf.Tensor]:
        controls = [c for old in op.control_inputs if (c := self._control(old)) is not None]
        with tf.control_dependencies(controls):
            made = self._ops[op] = graph_ops.copied(op, [self._of(tensor) for tensor in op.inputs])
        return list(made.outputs)

    def _control(self, old: tf.Operation) -> tf.Operation | None:
        if old in self._ops:
            return self._ops[old]
        outputs = [tensor for tensor in self._made[old] if tensor.graph is tf.compat.v1.get_default_graph()]
        return outputs[0].op if outputs else None

    def _variable(self, op: tf.Operation) -> tf.Variable:
        if op not in self.variables:
            shape, dtype = tf.TensorShape(op.get_attr("shape")), tf.as_dtype(op.get_attr("dtype"))
            self.variables[op] = resource_variable_ops.ResourceVariable(
                lambda: tf.zeros([size or 0 for size in shape.as_list()], dtype) if dtype != tf.string else "",
                shape=shape,
                trainable=False,
                name=op.name,
            )
        return self.variables[op]

    def _said_in_stock_ops(self, op: tf.Operation) -> list[tf.Tensor]:
        name = "sok_" + re.sub(r"(?<!^)(?=[A-Z])", "_", op.type.removeprefix("Sok>")).lower()
        method = getattr(StockOps, name, None)
        if method is None:
            raise ValueError(f"The graph cannot be exported: it uses an op that only sok has, {op.type} ('{op.name}').")
        parameters = inspect.signature(method).parameters
        attributes = {a.name: _plain(op.get_attr(a.name)) for a in op.op_def.attr if a.name in parameters}
        made = getattr(self._stock, name)(*self._arguments(op, op.inputs), **attributes)
        return [tensor for tensor in tf.nest.flatten(made, expand_composites=False) if tensor is not None]

    def _arguments(self, op: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[Any]:
        """The inputs of an op as its Python function takes them: lists where it takes lists."""
        flat, arguments = iter([self._of(tensor) for tensor in inputs]), []
        for argument in op.op_def.input_arg:
            if argument.number_attr:
                arguments.append([next(flat) for _ in range(op.get_attr(argument.number_attr))])
            elif argument.type_list_attr:
                arguments.append([next(flat) for _ in op.get_attr(argument.type_list_attr)])
            else:
                arguments.append(next(flat))
        return arguments

    def _inputs_of_lookup(self, combine: tf.Operation) -> list[tf.Tensor]:
        """What the first step of an exchange was given, found from its last: handles, keys, splits, weights."""
        return list(_route_of(combine).inputs)

    def _looked_up(self, combine: tf.Operation) -> list[tf.Tensor]:
        route = _route_of(combine)
        handles, _, insert, keys, row_splits, weights = self._arguments(route, route.inputs)
        table_of, combiners = (_plain(route.get_attr(name)) for name in ("table_of", "combiners"))
        limits = [_plain(route.get_attr(name)) for name in ("slot_num", "max_nnz", "max_feature_num")]
        outputs = []
        # `index` of both ops. From copies of other workers no rows come home, so this one may have fewer features.
        for f in (places.value_index - 3 for places in combine.inputs[2 : len(combine.outputs) + 2]):
            table, combiner = table_of[f], combiners[f]
            checked = self._stock.sok_validate_csr(handles[table], keys[f], row_splits[f], *[x[f] for x in limits])
            if combiner == "rows":
                outputs.append(self._stock.sok_table_lookup(handles[table], checked, insert, 0).rows)
                continue
            (pooled,), _ = self._stock.sok_group_lookup(
                [handles[table]], [checked], [row_splits[f]], [weights[f]], insert, [0], [0], [combiner]
            )
            outputs.append(pooled)
        return outputs


def _route_of(combine: tf.Operation) -> tf.Operation:
    """The ExchangeRoute of an ExchangeCombine, which gives it `index` and more."""
    return next(tensor.op for tensor in combine.inputs if tensor.op.type == "Sok>ExchangeRoute")


def _plain(value: Any) -> Any:
    """An attribute with texts for bytes."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.decode() if isinstance(value, bytes) else value
