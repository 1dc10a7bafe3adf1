"""Imports TensorFlow's v1 before and after DeepRec's names are installed: run by test_deeprec.py as a process."""

import tensorflow as tf

before = tf.compat.v1

import sok  # noqa: E402

sok.deeprec.install()

import tensorflow.compat.v1 as after  # noqa: E402

for module in (tf, before, after, tf.compat.v1, tf.compat.v2):
    assert module.get_embedding_variable is sok.deeprec.get_embedding_variable
sok.deeprec.uninstall()
assert not any(hasattr(module, "get_embedding_variable") for module in (tf, before, after))
