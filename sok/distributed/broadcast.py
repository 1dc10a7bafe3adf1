"""`broadcast_variables`: all workers start from the same dense weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok.base.types import Variable
from sok.job import context
from sok.table.table import is_embedding_variable


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> tf.Operation | None:
    """Gives all workers the values that the variables have on worker `root_rank`, in one collective.

    Args:
        variables: TensorFlow, Keras 3 or tf_keras variables, the same on all workers in the same order, of any number
            or bool dtype. Embedding variables among them are left out: each worker keeps its own rows, which start from
            the same values on any number of workers anyhow.
        root_rank: the worker whose values all get, in [0, R).

    Returns:
        In a v1 graph the op to run (after initialization); else None, and it is done.

    Raises:
        ValueError: `root_rank` is not a rank; a variable has no known shape.
        TypeError: a variable holds something else than numbers.
        tf.errors.OpError: the workers' variables differ in number or size.

    Collective. Exact: bits are copied.

    Example:
        >>> import sok, tensorflow as tf
        >>> weight = tf.Variable([1.0, 2.0])
        >>> sok.broadcast_variables([weight])
        >>> weight.numpy().tolist()
        [1.0, 2.0]
    """
    transport = context.get_transport()
    if isinstance(root_rank, bool) or not 0 <= root_rank < transport.size:
        raise ValueError(
            f"`root_rank` must be in [0, {transport.size}), the ranks of this job. Received: {root_rank!r}."
        )
    dense = _without_repeats(as_tf_variable(v) for v in variables if not is_embedding_variable(v))
    for variable in dense:
        _check(variable)
    is_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    if transport.size == 1 or not dense:
        return tf.no_op() if is_v1_graph else None
    with tf.device("/CPU:0"):
        # One vector of bytes: whatever the dtypes, it is one collective.
        mine = tf.concat([_to_bytes(tf.convert_to_tensor(variable)) for variable in dense], 0)
        bytes_of_root = transport.broadcast(mine, root_rank, context.unique_collective_name("sok/broadcast_variables"))
        parts = tf.split(bytes_of_root, [_num_bytes(variable) for variable in dense])
        assigned = [v.assign(_from_bytes(part, v), read_value=False) for v, part in zip(dense, parts, strict=True)]
    return tf.group(*assigned) if is_v1_graph else None


def as_tf_variable(variable: Variable) -> Any:
    """The TensorFlow variable that a variable of Keras 3 holds; any other as it is."""
    # Keras 3 variables hold one; of a TensorFlow variable, `value` is a method.
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def _without_repeats(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _check(variable: Any) -> None:
    if not variable.shape.is_fully_defined():
        raise ValueError(
            f"Variable '{variable.name}' cannot be broadcast: its shape is not known. Received: {variable.shape}."
        )
    dtype = variable.dtype.base_dtype
    if not (dtype.is_integer or dtype.is_floating or dtype.is_bool or dtype.is_complex):
        raise TypeError(
            f"Variable '{variable.name}' cannot be broadcast: its dtype is {variable.dtype.name}, not numbers."
        )


def _num_bytes(variable: Any) -> int:
    return variable.shape.num_elements() * variable.dtype.size


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _from_bytes(part: tf.Tensor, variable: Any) -> tf.Tensor:
    dtype = variable.dtype.base_dtype
    if dtype.size == 1:
        flat = tf.cast(part, dtype) if dtype == tf.bool else tf.bitcast(part, dtype)
    else:
        flat = tf.bitcast(tf.reshape(part, [-1, dtype.size]), dtype)
    return tf.reshape(flat, variable.shape)
