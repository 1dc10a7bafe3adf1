"""The `global_step` that v1 optimizers count in."""

from __future__ import annotations

import tensorflow as tf


def count_after(update: tf.Operation | None, global_step: tf.Variable | None) -> tf.Operation | None:
    """Adds 1 to `global_step`, if one is given, once `update` has run. Returns, in a v1 graph, the op that does both.

    Args:
        update: what `apply_gradients` gave: an op of a v1 graph, or None where the step is done already.
        global_step: an integer variable [], or None.
    """
    if global_step is None:
        return update
    with tf.control_dependencies([] if update is None else [update]):
        added = global_step.assign_add(1)
    return None if update is None else tf.convert_to_tensor(added).op
