"""AutoGraph leaves our code as it is, like that of TensorFlow and Keras; this module says so to it when it is imported.

Else it would rewrite, function by function, all that the first `tf.function` of a process calls: ours, and what that
calls, Numba too. Nothing of ours needs that, and it takes far longer than to trace. What users write is rewritten as
ever: their function, and what they call themselves. TensorFlow has no public way to say this of a whole package;
`tf.autograph.experimental.do_not_convert` would switch it off for what we call of theirs, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config

_OURS = ("sok", "sparse_operation_kit", "openembedding", "distributed_embeddings")

config.CONVERSION_RULES = (*map(config.DoNotConvert, _OURS), *config.CONVERSION_RULES)


def converting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function, for us to call as if they did: AutoGraph rewrites it where that is on.

    Example:
        >>> converting(lambda x: x + 1)(1)
        2
    """
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function  # says so itself
    routine: Any = function
    if not inspect.isroutine(routine):
        routine = routine.__call__
    autograph = tf.__internal__.autograph
    converted: Callable[..., Any] = autograph.tf_convert(routine, autograph.control_status_ctx())
    return converted
