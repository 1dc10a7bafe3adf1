"""Dense weights of a save: variables of TensorFlow beside the rows of tables, of one step with them.

They lie in two files beside the shards, as TensorFlow's checkpoints do, under the names that `named` gives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import tensorflow as tf
from tensorflow.python.checkpoint.graph_view import ObjectGraphView
from tensorflow.python.trackable import trackable_utils

from sok.base.errors import CheckpointError
from sok.base.files import link_or_copy
from sok.checkpoint.arguments import Tables
from sok.checkpoint.manifest import DenseFiles
from sok.table.table import is_embedding_variable

_ENDS = (".index", ".data-00000-of-00001")


def named(dense: bool | Mapping[str, tf.Variable], model: Tables) -> dict[str, tf.Variable]:
    """The variables that `dense` means, by the names that files have for them.

    Args:
        dense: True: those of `model` that are no tables and of no optimizer, by the way from the model to each, or by
            its number where there is none. Or variables, by names of one's own.
        model: a Keras model, a layer or a tf.Module.

    Raises:
        TypeError, ValueError: `dense` is neither; `model` has no parts that could be walked through, or is not built.
    """
    if isinstance(dense, Mapping):
        found = dict(dense)
        for name, variable in found.items():
            is_dense = isinstance(_plain(variable), tf.Variable) and not is_embedding_variable(variable)
            if not isinstance(name, str) or not is_dense:
                raise TypeError(f"`dense` must give a dense variable for each name. Received: {name!r}: {variable!r}.")
        return {name: _plain(variable) for name, variable in found.items()}
    if dense is not True:
        raise TypeError(f"`dense` must be a bool, or variables by their names. Received: {dense!r}.")
    model = cast(Any, model)
    if not isinstance(model, tf.Module) and not hasattr(model, "variables"):
        raise ValueError(
            "`dense=True` is for a Keras model, a layer or a tf.Module as `variables_or_model`. Give the variables by "
            "names: dense={'name': variable}."
        )
    if getattr(model, "built", True) is False:
        raise ValueError(
            f"dense=True: the model {getattr(model, 'name', type(model).__name__)!r} is not built, so it has no dense "
            "weights yet. Call it on a batch first, or build it."
        )
    # Keras 3 counts states of random generators among `variables`, and has no way to them.
    variables = model.variables if isinstance(model, tf.Module) else getattr(model, "weights", model.variables)
    variables = variables() if callable(variables) else variables
    own = {id(_plain(one)): number for number, one in enumerate(v for v in variables if not is_embedding_variable(v))}
    objects, paths = _WithoutOptimizers(model).breadth_first_traversal()
    found = {
        trackable_utils.object_path_to_string(paths[one]): _plain(one)
        for one in objects
        if isinstance(_plain(one), tf.Variable) and not is_embedding_variable(one) and id(_plain(one)) in own
    }
    for one in found.values():
        own.pop(id(one), None)
    # TensorFlow walks through no list of layers in a model of Keras 3.
    rest = {id(_plain(one)): _plain(one) for one in variables}
    return found | {f"variables/{number}": rest[one] for one, number in own.items()}


class _WithoutOptimizers(ObjectGraphView):
    """What a model has, without its optimizers: these may lead to its variables, too, and who serves has none."""

    def children(self, obj: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().children(obj, *args, **kwargs)
        return {name: child for name, child in found.items() if not hasattr(child, "apply_gradients")}


def _plain(variable: Any) -> Any:
    """The variable of TensorFlow in one of Keras 3."""
    return getattr(variable, "_value", variable)


def write(folder: str, generation: str, values: Mapping[str, tf.Tensor]) -> DenseFiles:
    """Writes values into files of that generation; the disk has them when this returns.

    Raises:
        tf.errors.OpError, OSError: of the disk.
    """
    name = f"{generation}-dense"
    prefix = os.path.join(folder, name)
    with tf.init_scope(), tf.device("/CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(values),
            shape_and_slices=[""] * len(values),
            tensors=list(values.values()),
        )
    for end in _ENDS:
        descriptor = os.open(prefix + end, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return DenseFiles(name, tuple(sorted(values)), sum(os.path.getsize(prefix + end) for end in _ENDS))


def copy(folder: str, dense: DenseFiles, generation: str) -> DenseFiles:
    """The same for a save of another generation, which has the same values."""
    name = f"{generation}-dense"
    for end in _ENDS:
        link_or_copy(os.path.join(folder, dense.name + end), os.path.join(folder, name + end))
    return DenseFiles(name, dense.variables, dense.bytes)


class Reader:
    """Reads the dense weights of a save.

    Raises:
        CheckpointError: the files are missing, or not those of the save.
    """

    def __init__(self, folder: str, dense: DenseFiles) -> None:
        prefix = os.path.join(folder, dense.name)
        try:
            size = sum(os.path.getsize(prefix + end) for end in _ENDS)
        except OSError as error:
            raise CheckpointError(f"{prefix}: the dense weights of the save are missing: {error.strerror}.") from None
        if size != dense.bytes:
            raise CheckpointError(f"{prefix}: has {size:,} bytes, where the manifest says {dense.bytes:,}.")
        self._prefix = prefix
        self.variables = dense.variables

    def read(self, name: str, dtype: tf.DType) -> tf.Tensor:
        """One of them; TensorFlow checks its CRC.

        Raises:
            tf.errors.OpError: it is damaged, missing, or of another dtype.
        """
        with tf.init_scope(), tf.device("/CPU:0"):
            (value,) = tf.raw_ops.RestoreV2(
                prefix=self._prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
            )
        return value


def values_for(reader: Reader, variables: Mapping[str, tf.Variable]) -> dict[str, tf.Tensor]:
    """What these variables are to be, read and checked.

    Raises:
        ValueError: one is missing there, or has another shape.
        tf.errors.OpError: as `Reader.read`.
    """
    missing = sorted(set(variables) - set(reader.variables))
    if missing:
        raise ValueError(
            f"The save has no dense weights of the names {', '.join(map(repr, missing[:5]))}. It has "
            f"{', '.join(map(repr, reader.variables[:5])) or 'none'}. Save and follow with the same model, or give "
            "`dense` as variables by names."
        )
    values = {name: reader.read(name, variable.dtype) for name, variable in variables.items()}
    for name, variable in variables.items():
        if not variable.shape.is_compatible_with(values[name].shape):
            raise ValueError(
                f"Dense weights '{name}' have shape {values[name].shape} in the save, and {variable.shape} here."
            )
    return values
