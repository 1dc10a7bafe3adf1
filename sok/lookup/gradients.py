"""Gradients of the native ops. Imported once, by `sok.base._ops.lib()`, after the library is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf

from sok.base import _ops

_Grad: TypeAlias = "tf.Tensor | tf.IndexedSlices"


class _RowSlices(tf.IndexedSlices):
    """The gradient of a table. Nothing may turn it into a dense matrix of the whole table."""


def _never_a_matrix(slices: _RowSlices, *_: Any, **__: Any) -> Any:
    # Not one of the errors that TensorFlow catches here, to say that a type is not convertible.
    raise LookupError(
        "The gradient of an embedding table is slices, of the rows that were looked up. Something asks for a matrix of "
        "all rows. tf.while_loop does, with the tape outside and a lookup inside: look up before the loop, or put the "
        "tape into its body. tf.recompute_grad does: look up outside of its function, and give it the vectors. "
        "tape.jacobian does: take it in the vectors. Code of your own finds gradient.values, and gradient.indices, "
        "which are row numbers of this worker."
    )


tf.register_tensor_conversion_function(_RowSlices, _never_a_matrix, priority=1)


def _slices(values: tf.Tensor, row_ids: tf.Tensor) -> tf.IndexedSlices:
    return _RowSlices(values, row_ids)


def summed_slices(values: tf.Tensor, row_ids: tf.Tensor) -> tf.IndexedSlices:
    """The gradient of a table, slices in which no row comes twice."""
    row_ids._sok_distinct = True
    return _slices(values, row_ids)


def are_distinct(slices: tf.IndexedSlices) -> bool:
    """Whether it is known that no row comes twice. The mark is lost, at no harm, where a function hands slices on."""
    return getattr(slices.indices, "_sok_distinct", False)


@tf.RegisterGradient("Sok>TableLookup")
def _table_lookup_grad(op: tf.Operation, grad: _Grad, _: tf.Tensor) -> tuple[_Grad | None, ...]:
    # The handle itself must not be touched here: inside a function it would become an intermediate tensor of the
    # backward graph, which no tape can follow. The identity keeps row ids a tensor that the backward graph may capture.
    row_ids = tf.identity(op.outputs[1])
    if isinstance(grad, tf.IndexedSlices) and op.outputs[0].shape[0] == 0:
        return grad, None, None  # see sok/table/custom_gradients.py
    return _slices(tf.reshape(grad, [-1, op.get_attr("dim")]), tf.reshape(row_ids, [-1])), None, None


@tf.RegisterGradient("Sok>ExchangeServe")
def _exchange_serve_grad(op: tf.Operation, grad: tf.Tensor, *_: tf.Tensor) -> list[_Grad | None]:
    num_tables = op.get_attr("T")
    # Where the table is: with a GPU beside a table on the CPU, gradients would travel there for nothing.
    device = op.outputs[0].device
    with tf.device(device) if device else contextlib.nullcontext():
        row_ids, sums = _ops.lib().sok_exchange_sum_grad(
            grad,
            op.outputs[2],
            op.outputs[3],
            [tf.identity(ids) for ids in op.outputs[4:]],
            table_of=op.get_attr("table_of"),
            copy_of=op.get_attr("copy_of"),
            dims=op.get_attr("dims"),
            capacities=op.get_attr("capacities"),
        )
    slices = [summed_slices(s, ids) for s, ids in zip(sums, row_ids, strict=True)]
    return [*slices, *[None] * (len(op.inputs) - num_tables)]


@tf.RegisterGradient("Sok>GroupLookup")
def _group_lookup_grad(op: tf.Operation, *of_outputs: tf.Tensor) -> list[_Grad | None]:
    table_of, dims, combiners = (op.get_attr(name) for name in ("table_of", "dims", "combiners"))
    num_tables, num_features = len(dims), len(table_of)
    handles, of_features = op.inputs[:num_tables], op.inputs[num_tables:-1]
    keys, row_splits, weights = (list(of_features[i * num_features : (i + 1) * num_features]) for i in range(3))
    grads = list(of_outputs[:num_features])
    # In a v1 graph nothing else keeps the update of the rows behind this, which reads them.
    of_weights = _group_lookup_grad_weights(op, handles, grads, keys, row_splits, weights)
    # Sums of a GPU are other than those that the update of a table on the host takes.
    device = op.outputs[0].device if "CPU" in op.outputs[0].device else ""
    in_place = tf.device(device) if device else contextlib.nullcontext()
    with tf.control_dependencies([g for g in of_weights if g is not None]), in_place:
        row_ids, sums = _ops.lib().sok_group_lookup_grad(
            grads,
            [tf.identity(ids) for ids in op.outputs[num_features:]],
            row_splits,
            weights,
            M=num_tables,
            table_of=table_of,
            dims=dims,
            combiners=combiners,
            capacities=op.get_attr("capacities"),
        )
    slices = [summed_slices(s, ids) for s, ids in zip(sums, row_ids, strict=True)]
    return [*slices, *[None] * (2 * num_features), *of_weights, None]


def _group_lookup_grad_weights(
    op: tf.Operation,
    handles: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    keys: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
) -> list[tf.Tensor | None]:
    """For each feature the gradient of its weights; None where it has none, or where a tape does not ask for it."""
    first = len(op.inputs) - 1 - len(weights)
    unwanted = getattr(op, "skip_input_indices", None) or ()
    wanted = [f for f, w in enumerate(weights) if w.shape.num_elements() != 0 and first + f not in unwanted]
    found: list[tf.Tensor | None] = [None] * len(weights)
    if not wanted:
        return found
    # Attributes are parsed anew each time that an op is asked for them.
    table_of, combiners = op.get_attr("table_of"), op.get_attr("combiners")
    of_wanted = _ops.lib().sok_group_lookup_grad_weights(
        handles,
        *([values[f] for f in wanted] for values in (grads, keys, row_splits, weights)),
        table_of=[table_of[f] for f in wanted],
        dims=op.get_attr("dims"),
        combiners=[combiners[f] for f in wanted],
    )
    for f, gradient in zip(wanted, of_wanted, strict=True):
        found[f] = gradient
    return found


@tf.RegisterGradient("Sok>VariablePool")
@tf.RegisterGradient("Sok>TensorPool")
def _variable_pool_grad(op: tf.Operation, *grads: tf.Tensor) -> list[_Grad | None]:
    attributes = {name: op.get_attr(name) for name in ("names", "num_rows", "dims", "variable_of", "combiners")}
    num_variables, num_features = len(attributes["names"]), len(grads)
    ids = op.inputs[num_variables : num_variables + num_features]
    row_splits = op.inputs[num_variables + num_features :]
    # Of what was read it needs nothing. In a v1 graph nothing else keeps the update of the rows behind their reading.
    in_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    with tf.control_dependencies(op.outputs[:1] if in_v1_graph else []):
        unique_ids, sums = _ops.lib().sok_variable_pool_grad(
            list(grads), list(ids), list(row_splits), M=num_variables, **attributes
        )
    slices = []
    for i, (of_variable, values) in enumerate(zip(unique_ids, sums, strict=True)):
        of_variable._sok_distinct = True
        # Unlike those of a table, these may become a matrix: that of the variable.
        shape = tf.constant([attributes["num_rows"][i], attributes["dims"][i]], tf.int64)
        slices.append(tf.IndexedSlices(values, of_variable, shape))
    return [*slices, *[None] * (2 * num_features)]


@tf.RegisterGradient("Sok>VariablePoolGrad")
def _variable_pool_grad_grad(op: tf.Operation, *grads: _Grad) -> list[tf.Tensor | None]:
    # The sums are linear in what came back for the outputs: what comes back for sums is pooled as the rows were.
    variable_of = op.get_attr("variable_of")
    combiners = [tf.compat.as_str(c) for c in op.get_attr("combiners")]
    num_variables, num_features = len(grads) // 2, len(variable_of)
    ids, row_splits = op.inputs[num_features : 2 * num_features], op.inputs[2 * num_features :]
    unique_ids, found = op.outputs, []
    for f, (variable, combiner) in enumerate(zip(variable_of, combiners, strict=True)):
        of_sums = tf.convert_to_tensor(grads[num_variables + variable])
        order = tf.argsort(unique_ids[variable])
        place = tf.gather(order, tf.searchsorted(tf.gather(unique_ids[variable], order), ids[f]))
        if combiner == "rows":
            found.append(tf.gather(of_sums, place))
        else:
            index, no_weights = tf.cast(place, tf.int64), tf.zeros([0], tf.float32)
            found.append(_ops.lib().sok_combine(of_sums, index, row_splits[f], no_weights, combiner=combiner))
    return [*found, *[None] * (2 * num_features)]


@tf.RegisterGradient("Sok>ExchangeCheck")
def _exchange_check_grad(op: tf.Operation, grad: tf.Tensor, _: Any) -> tuple[tf.Tensor | None, ...]:
    return grad, None, None


@tf.RegisterGradient("Sok>ExchangeCombine")
def _exchange_combine_grad(op: tf.Operation, *of_outputs: tf.Tensor) -> list[tf.Tensor | None]:
    # The splits come once the answers are known to be rows: collective 3 cannot run before collective 2 is done, and
    # where an owner's bad news are raised, nothing is updated on any rank.
    lib, grads = _ops.lib(), of_outputs
    num_features = len(grads)
    of_features = op.inputs[2:]
    index, row_splits, weights, scales = (of_features[i * num_features : (i + 1) * num_features] for i in range(4))
    combiners, dims = [tf.compat.as_str(c) for c in op.get_attr("combiners")], op.get_attr("dims")
    packed = lib.sok_exchange_combine_grad(
        list(grads), op.inputs[1], index, row_splits, weights, scales, combiners=combiners, dims=dims
    )
    with tf.control_dependencies([packed]):  # of weights, too, there is none where bad news are raised
        of_weights = [
            tf.zeros_like(weights[f])
            if weights[f].shape.num_elements() == 0
            else lib.sok_exchange_combine_grad_weights(
                grads[f],
                op.inputs[0],
                *([of_feature[f]] for of_feature in (index, row_splits, weights, scales)),
                combiners=[combiners[f]],
                dims=[dims[f]],
            )
            for f in range(num_features)
        ]
    return [packed, None, *[None] * 2 * num_features, *of_weights, *[None] * num_features]


@tf.RegisterGradient("Sok>Combine")
def _combine_grad(op: tf.Operation, grad: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
    rows, index, row_splits, weights = op.inputs
    combiner = op.get_attr("combiner")
    num_rows = tf.shape(rows, out_type=tf.int64)[0]
    lib = _ops.lib()
    grad_rows = lib.sok_combine_grad_rows(grad, index, row_splits, weights, num_rows, combiner=combiner)
    grad_weights = lib.sok_combine_grad_weights(grad, rows, index, row_splits, weights, combiner=combiner)
    return grad_rows, None, None, grad_weights


@tf.RegisterGradient("Sok>SparseToCsr")
def _sparse_to_csr_grad(
    op: tf.Operation, _splits: tf.Tensor, _keys: tf.Tensor, grad_weights: tf.Tensor, _order: tf.Tensor
) -> tuple[tf.Tensor | None, ...]:
    # Output i came from input order[i]. With no weights at all both are empty.
    weights = op.inputs[2]
    order = op.outputs[3][: tf.shape(weights)[0]]
    return None, None, tf.scatter_nd(order[:, None], grad_weights, tf.shape(weights, out_type=tf.int64)), None


@tf.RegisterGradient("Sok>UnsortedSegmentSum")
def _unsorted_segment_sum_grad(op: tf.Operation, grad: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
    # Dropped rows (negative ids) get zeros, as in TensorFlow.
    ids = op.inputs[1]
    gathered = tf.gather(grad, tf.maximum(ids, tf.zeros_like(ids)))
    kept = tf.reshape(ids >= 0, tf.concat([tf.shape(ids), tf.ones([tf.rank(gathered) - tf.rank(ids)], tf.int32)], 0))
    return tf.where(kept, gathered, tf.zeros_like(gathered)), None, None


@tf.RegisterGradient("Sok>TraceCollective")
@tf.RegisterGradient("Sok>TraceCollectiveDone")
def _trace_collective_grad(op: tf.Operation, grad: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
    return grad, *[None] * (len(op.inputs) - 1)


@tf.RegisterGradient("Sok>ToDevice")
def _to_device_grad(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor | None]:
    # Only weights have any; keys and row splits are integers.
    return [g if t.dtype.is_floating else None for t, g in zip(op.inputs, grads, strict=True)]


def _not_a_second_time(op: tf.Operation, *_: tf.Tensor) -> NoReturn:
    raise LookupError(
        f"{op.type} is part of the gradient of a lookup, which cannot be differentiated a second time. Look up outside "
        "of the inner tape, let it watch the vectors that were looked up, and take its gradient in those."
    )


_ONLY_ONCE = (
    "GroupLookupGrad GroupLookupGradWeights ExchangeSumGrad ExchangeCombineGrad ExchangeCombineGradWeights "
    "ExchangeNarrow ExchangeWiden ExchangeToCopies "
    "CombineGradRows CombineGradWeights"
)
for _name in _ONLY_ONCE.split():
    tf.RegisterGradient(f"Sok>{_name}")(_not_a_second_time)

_WITHOUT_GRADIENT = (
    "ReadAhead ExchangeReadAhead ExchangeRoute ExchangePeek ExchangeRepair ExchangeMend TableRowsAhead "
    "ValidateCsr CheckIds SlotKeys SumDuplicates Unique TableExport TableSize TableStep TableIds "
    "TableRestore TableSlotSets TableGather TableScatter TableSave TableLoad TableKeys ShardVerify"
)
for _name in _WITHOUT_GRADIENT.split():
    tf.no_gradient(f"Sok>{_name}")
