"""Types of arguments, where several kinds of value will do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # what looks at checkpoints needs no TensorFlow, and no Keras need be there
    import keras
    import tensorflow as tf
    import tf_keras


@runtime_checkable
class Shaped(Protocol):
    """A tensor or array, of any library."""

    shape: Any
    dtype: Any


PathLike: TypeAlias = "str | os.PathLike[str]"
DTypeLike: TypeAlias = "tf.DType | np.dtype | type | str"  # what tf.as_dtype takes
TensorLike: TypeAlias = (
    "tf.Tensor | tf.Variable | np.ndarray | Sequence[Any] | float"  # what tf.convert_to_tensor takes
)
Ids: TypeAlias = "TensorLike | tf.SparseTensor | tf.RaggedTensor"
Condition: TypeAlias = "bool | tf.Tensor"
Training: TypeAlias = "bool | int | tf.Tensor | tf.Variable | None"  # as Keras passes it on
Scalar: TypeAlias = "float | np.number | tf.Tensor"
Shape: TypeAlias = "Sequence[int | None] | tf.TensorShape"
Variable: TypeAlias = "tf.Variable | keras.Variable"
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
Session: TypeAlias = "tf.compat.v1.Session | tf.compat.v1.train.MonitoredSession"
Rate: TypeAlias = "float | tf.Variable | tf.Tensor | Callable[..., Any]"
"""What `sok.optimizers.Optimizer` takes as `learning_rate`."""

# Of Keras 3 and of tf_keras; optimizers also of TensorFlow 1.
KerasModel: TypeAlias = "keras.Model | tf_keras.Model"
KerasLayer: TypeAlias = "keras.layers.Layer | tf_keras.layers.Layer"
Exportable: TypeAlias = "KerasModel | tf.Module | Callable[..., Any] | Session"
KerasInitializer: TypeAlias = "str | Mapping[str, Any] | keras.initializers.Initializer | Callable[..., Any]"
Logs: TypeAlias = "Mapping[str, Any] | None"
StockOptimizer: TypeAlias = "keras.optimizers.Optimizer | tf_keras.optimizers.Optimizer | tf.compat.v1.train.Optimizer"
