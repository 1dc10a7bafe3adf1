"""Types of arguments, where several kinds of value will do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:  # what looks at checkpoints needs no TensorFlow
    import tensorflow as tf

PathLike: TypeAlias = "str | os.PathLike[str]"
DTypeLike: TypeAlias = "tf.DType | np.dtype | type | str"  # what tf.as_dtype takes
TensorLike: TypeAlias = (
    "tf.Tensor | tf.Variable | np.ndarray | Sequence[Any] | float"  # what tf.convert_to_tensor takes
)
Ids: TypeAlias = "TensorLike | tf.SparseTensor | tf.RaggedTensor"
Condition: TypeAlias = "bool | tf.Tensor"
Rate: TypeAlias = "float | tf.Variable | tf.Tensor | Callable[..., Any]"
"""What `sok.optimizers.Optimizer` takes as `learning_rate`."""
