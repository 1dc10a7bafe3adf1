"""How gradients of several workers become one: dense ones in one collective, rows of tables where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.distributed import replicas, slices
from sok.distributed.broadcast import as_tf_variable
from sok.job import context
from sok.job.transport import ordering
from sok.table.table import is_embedding_variable

Average = "average"
Sum = "sum"

_ON_SOME = (
    "The gradient of a variable is None on some workers and not on others, or tf.IndexedSlices on some only. All must "
    "run the same program. Variables:"
)

Pair = tuple[Any, Any]  # (gradient, variable)


def check_op(op: object) -> str:
    """Returns `op` as 'average' or 'sum', given in any capitalisation."""
    lowered = op.lower() if isinstance(op, str) else op
    if lowered not in (Average, Sum):
        raise ValueError(f"`op` must be sok.Average ('average') or sok.Sum ('sum'). Received: {op!r}.")
    return lowered


def split_pairs(grads_and_vars: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Splits (gradient, variable) pairs into those of tables and the others, in order."""
    pairs = [(grad, variable) for grad, variable in grads_and_vars]
    tables = [pair for pair in pairs if is_embedding_variable(pair[1])]
    return tables, [pair for pair in pairs if not is_embedding_variable(pair[1])]


def table_scale(op: str) -> float:
    """The factor for gradients of rows.

    Owners hold the sum over all workers of what each of them sent, so an average is that divided by R.
    """
    return 1.0 / context.size() if op == Average else 1.0


def reduce_dense(pairs: Sequence[Pair], op: str, of_tables: Sequence[Pair] = ()) -> list[Any]:
    """Sums or averages the gradients of ordinary variables over all workers, in one collective.

    Args:
        pairs: (gradient, variable): dense, `tf.IndexedSlices` (which become dense: other workers have other rows), or
            None.
        op: 'average' or 'sum'.
        of_tables: (gradient, table) of the same step.

    Returns:
        Gradients in the order of `pairs`; None where it was None. With one worker, what came.

    Raises:
        tf.errors.InvalidArgumentError: a gradient is None on some workers only, or, in the second step, variables
            differ between workers; on all workers.

    Collective: the same variables in the same order on all workers. Where a lookup of the step raises, no worker takes
    part: those that did would change their variables, and wait for the others'.
    """
    return reduce_weighted(pairs, op, of_tables)[0]


def reduce_weighted(
    pairs: Sequence[Pair],
    op: str,
    of_tables: Sequence[Pair] = (),
    samples: tf.Tensor | None = None,
    keeps_slices: bool = False,
) -> tuple[list[Any], tf.Tensor | None]:
    """`reduce_dense`, where an average weighs workers by their samples.

    Args:
        samples: of this worker, by whose number its gradients, those of `of_tables` too, are multiplied already for an
            average. 0 of one that has no batch. None: all workers weigh the same.
        keeps_slices: whether `tf.IndexedSlices` stay what they are, those of all workers: as one worker has them that
            has the samples of all. One collective more, the first, if any gradient here is slices or None.

    Returns:
        The gradients, and how many samples a worker has on average, of a sum all: float32 []. For an average gradients
        of tables are to be divided by that and by R. None if `samples` is. Where no worker has samples gradients are
        zeros.
    """
    pairs = list(pairs)
    transport = context.get_transport()
    if transport.size == 1 or not (pairs or samples is not None):
        return [grad for grad, _ in pairs], None
    variables = [variable for _, variable in pairs]
    kept: dict[int, tf.IndexedSlices] = {}  # by their places in `pairs`
    agreed = None
    # Also one that has None: a peer may have slices there.
    if keeps_slices and any(grad is None or isinstance(grad, tf.IndexedSlices) for grad, _ in pairs):
        words = slices.pack(pairs)
        with _answered(of_tables):
            words = tf.identity(words)
        is_same, kept = slices.of_all_workers(words, pairs)
        agreed = _check_same(is_same, variables)
    others = [place for place in range(len(pairs)) if place not in kept]
    # What is None here still takes part, as zeros: a worker that left it out would leave its peers waiting for it.
    dense = [_where_it_is_added(_dense(*pairs[place]), variables[place]) for place in others]
    dtype = dense[0].dtype if dense else tf.float32
    told = replicas.told([v for v in variables if _is_variable(v)])
    with tf.device("/CPU:0"):  # where what all have said is looked at
        is_present = tf.constant([float(grad is not None) for grad, _ in pairs], dtype)
        weight = [] if samples is None else [tf.reshape(tf.cast(samples, tf.float32), [1])]
        told = tf.identity(told)
    name = context.unique_collective_name("sok/dense_gradients")
    with _answered(of_tables), tf.control_dependencies([] if agreed is None else [agreed]):
        of_all = transport.grouped_all_reduce([*weight, told, is_present, *dense], name, average=op == Average)
    mean = of_all.pop(0)[0] if weight else None
    all_told, present, *reduced = of_all
    workers = 1 if op == Average else transport.size
    checks = [
        _check_present(present, is_present, workers, variables),
        replicas.check(all_told, told, workers, _names([v for v in variables if _is_variable(v)])),
    ]

    def weighed(values: tf.Tensor) -> tf.Tensor:
        return values if mean is None or op != Average else tf.math.divide_no_nan(values, tf.cast(mean, values.dtype))

    with tf.control_dependencies([check for check in checks if check is not None]):
        results: list[Any] = [None] * len(pairs)
        for place, grad in zip(others, reduced, strict=True):
            if pairs[place][0] is not None:
                results[place] = weighed(grad)
                if results[place] is grad or grad.shape != variables[place].shape:  # an op in here waits for the checks
                    results[place] = tf.ensure_shape(results[place], variables[place].shape)
        for place, whole in kept.items():
            values = whole.values / (transport.size if op == Average else 1)
            results[place] = tf.IndexedSlices(weighed(values), whole.indices, whole.dense_shape)
        return results, mean


def _answered(of_tables: Sequence[Pair]) -> contextlib.AbstractContextManager[None]:
    """Inside, ops wait for the answers to the step's lookups; in a v1 graph, to those of the tables given."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return ordering.after_answers()
    return tf.control_dependencies([grad.values for grad, _ in of_tables if grad is not None])


def _where_it_is_added(grad: tf.Tensor, variable: Any) -> tf.Tensor:
    """A gradient that is said to lie where its variable does: inside a function nobody says it of a tensor."""
    device = getattr(as_tf_variable(variable), "device", "")
    if not (context.get_transport().adds_on_gpu and device):
        return grad
    with tf.device(device):
        return tf.identity(grad)


def _dense(grad: Any, variable: Any) -> tf.Tensor:
    shape = tf.TensorShape(variable.shape)
    if grad is None:
        return tf.zeros(shape, variable.dtype)
    if not isinstance(grad, tf.IndexedSlices):
        return tf.convert_to_tensor(grad)
    # Not tf.convert_to_tensor: that warns, and needs a dense_shape, which not all slices have.
    dense = tf.math.unsorted_segment_sum(grad.values, grad.indices, shape[0])
    dense.set_shape(shape)
    return dense


def _check_present(present: tf.Tensor, mine: tf.Tensor, workers: int, variables: Sequence[Any]) -> Any:
    """Fails unless the workers agree. `present` is 0 or `workers`, up to rounding in short floats, if they do."""
    if not variables:
        return None
    told, how = dict(problem=_ON_SOME, names=_names(variables)), dict(workers=workers, size=context.size())
    present, mine = tf.cast(present, tf.float32), tf.cast(mine, tf.float32)
    return _ops.lib().sok_check_reduced(present, mine, may_be_silent=False, **told, **how)


def _check_same(is_same: tf.Tensor, variables: Sequence[Any]) -> Any:
    if not variables:
        return None
    return _ops.lib().sok_check_same(is_same, problem=_ON_SOME, names=_names(variables))


def _names(variables: Sequence[Any]) -> list[str]:
    return [_name(variable) for variable in variables]


def _name(variable: Any) -> str:
    # Keras 3 has paths. Eager tensors, which may be sources of a tape too, have no name at all.
    return (getattr(variable, "path", None) or variable.name) if _is_variable(variable) else "(a tensor)"


def _is_variable(variable: Any) -> bool:
    return isinstance(variable, tf.Variable) or hasattr(variable, "path")
