"""What scripts ask SOK's library of kernels that is no kernel: which TensorFlow this is."""

from sok import tf_version


def in_tensorflow2() -> bool:
    """Whether this is TensorFlow 2, as ever here; also where a script runs under `tf.compat.v1`."""
    return tf_version[0] == 2
