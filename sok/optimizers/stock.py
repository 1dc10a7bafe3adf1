"""Which optimizers there are besides ours."""

from __future__ import annotations

import sys

import tensorflow as tf


def stock_bases() -> dict[str, type]:
    """The classes from which optimizers derive: of 'v1' and, where somebody has imported them, 'keras' 3, 'tf_keras'
    and its 'legacy' ones.

    Of a Keras that nobody has imported no optimizer can have come in, and importing one takes seconds.
    """
    bases: dict[str, type] = {"v1": tf.compat.v1.train.Optimizer}
    if "keras" in sys.modules:
        bases["keras"] = sys.modules["keras"].optimizers.Optimizer
    if "tf_keras" in sys.modules:
        optimizers = sys.modules["tf_keras"].optimizers
        bases |= {"tf_keras": optimizers.Optimizer, "legacy": optimizers.legacy.Optimizer}
    return bases
