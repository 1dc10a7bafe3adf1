"""What scripts ask SOK's library of kernels that is no kernel: which TensorFlow this is."""

import tensorflow as tf


def in_tensorflow2() -> bool:
    """Whether this is TensorFlow 2: not where a script has switched to the behaviour of TensorFlow 1."""
    return tf.compat.v1.executing_eagerly_outside_functions()
