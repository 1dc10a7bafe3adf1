"""Where ids lie; and those in the memory of the host on their way to tables on a GPU: together, by one copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.lookup.feature import Csr, Feature, Group

# Ops whose outputs are what somebody has handed to a graph, of which it says no device: the host's, as a rule.
_HANDED_IN = ("Placeholder", "IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")
# Whose output lies where their input does, if a graph says nothing.
_PASSED_ON = ("Identity", "Reshape", "Cast", "ExpandDims", "Squeeze")


def beside(feature: Feature) -> contextlib.AbstractContextManager[Any]:
    """Where to make Csr of a feature's ids: on the host, if they lie there and the table on a GPU; else anywhere."""
    is_apart = feature.is_of_table and (_is_gpu(feature.table.handle.device) or feature.table.options.on_host)
    if is_apart and all(_is_on_host(part) for part in _parts(feature.ids)):
        return tf.device("/CPU:0")
    return contextlib.nullcontext()


def at(group: Group) -> contextlib.AbstractContextManager[Any]:
    """Where to make a lookup in tables of this worker: beside those that are to be on the host, so that the gradient
    knows where rows are; else where TensorFlow says."""
    is_told = group.tables[0].options.on_host and not _ops.is_substituted()
    return tf.device(group.device) if is_told and group.device else contextlib.nullcontext()


def together(device: str, *columns: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """The tensors of each column, on the device: those that lie on the host by one op, if the device is a GPU.

    Example:
        >>> [[ids]] = together("/CPU:0", [tf.constant([1, 2])])
        >>> ids.numpy().tolist()
        [1, 2]
    """
    return _moved(device, columns, _is_to_move)


def from_host(device: str, *columns: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """As `together`, of tensors that an op placed on `device` has in the memory of the host."""
    return _moved(device, columns, lambda tensor: True)


def lie_on(device: str, tensors: Sequence[tf.Tensor]) -> bool:
    """Whether all tensors are known to lie on `device`, a GPU.

    Example:
        >>> lie_on("/CPU:0", [tf.constant([1, 2])])
        False
    """
    return _is_gpu(device) and not _ops.is_substituted() and all(map(_is_on_gpu, tensors))


def _moved(
    device: str, columns: Sequence[Sequence[tf.Tensor]], is_to_move: Callable[[tf.Tensor], bool]
) -> list[list[tf.Tensor]]:
    found = [list(column) for column in columns]
    # An op of ours would be in the way of who copies v1 graphs, or exports models.
    if not _is_gpu(device) or _ops.is_substituted() or not tf.compat.v1.executing_eagerly_outside_functions():
        return found
    places = [(c, i) for c, column in enumerate(found) for i, t in enumerate(column) if is_to_move(t)]
    if not places:
        return found
    with tf.device(device):
        moved = _ops.lib().sok_to_device([found[c][i] for c, i in places])
    for (c, i), tensor in zip(places, moved, strict=True):
        found[c][i] = tensor
    return found


def _is_gpu(device: str | None) -> bool:
    return "GPU" in (device or "")


def _is_to_move(tensor: tf.Tensor) -> bool:
    return tensor.shape.num_elements() != 0 and _is_on_host(tensor)


def _is_on_host(value: Any) -> bool:
    """Whether a tensor is known to lie in the memory of the host; NumPy's arrays and numbers do."""
    if not tf.is_tensor(value):
        return True
    if isinstance(value, tf.__internal__.EagerTensor):
        return "CPU" in value.backing_device
    op = getattr(value, "op", None)
    if op is None:
        return False
    outer = _handed_to(op.graph, value)
    if outer is not None:
        return _is_on_host(outer)
    if op.type in _HANDED_IN and op.inputs:  # an iterator, which may bring what it has to a GPU (prefetch_to_device)
        iterator = _handed_to(op.graph, op.inputs[0])
        return iterator is None or not _is_gpu(iterator.device)
    return op.type in _HANDED_IN or "CPU" in (value.device or "")


def _is_on_gpu(tensor: tf.Tensor) -> bool:
    """Whether a tensor is known to lie on a GPU."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return _is_gpu(tensor.backing_device)
    op = getattr(tensor, "op", None)
    if op is None:
        return False
    outer = _handed_to(op.graph, tensor)
    if outer is not None:
        return _is_on_gpu(outer)
    if tensor.device:
        return _is_gpu(tensor.device)
    if op.type in _HANDED_IN:
        iterator = _handed_to(op.graph, op.inputs[0]) if op.inputs else None
        return iterator is not None and _is_gpu(iterator.device)
    return op.type in _PASSED_ON and _is_on_gpu(op.inputs[0])


def _handed_to(graph: tf.Graph, inner: tf.Tensor) -> Any | None:
    """What a function has of the outside in the place of `inner`, if that is known when it is traced."""
    return next((outer for outer, one in getattr(graph, "captures", ()) if one is inner), None)


def _parts(ids: Any) -> list[Any]:
    """The tensors that ids are made of."""
    if isinstance(ids, Csr):
        return [part for part in (ids.keys, ids.row_splits) if part is not None]
    if isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        return list(tf.nest.flatten(ids, expand_composites=True))
    return [ids]
