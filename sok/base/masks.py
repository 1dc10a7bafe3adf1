"""Some rows of a tensor, by few ops."""

from __future__ import annotations

import tensorflow as tf


def kept(is_kept: tf.Tensor, *values: tf.Tensor) -> list[tf.Tensor]:
    """Of each of `values` [n, ...] those rows for which `is_kept`, bool [n], says so.

    As `tf.boolean_mask` does, which takes 27 ops for each tensor: what is traced once for each table has to take few.

    Example:
        >>> [one.numpy().tolist() for one in kept(tf.constant([True, False]), tf.constant([1, 2]), tf.constant([3, 4]))]
        [[1], [3]]
    """
    places = tf.reshape(tf.where(is_kept), [-1])
    return [tf.gather(one, places) for one in values]
