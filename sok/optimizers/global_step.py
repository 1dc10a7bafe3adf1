"""The `global_step` that v1 optimizers count in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok.optimizers.base import Optimizer


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


class CountsGlobalStep(Optimizer):
    """For the bases of an optimizer, before its rule: `apply_gradients` with v1's arguments."""

    def apply_gradients(  # type: ignore[override]  # v1 and Keras differ in the second argument
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
        gradient_scale: float | tf.Tensor | None = None,
    ) -> tf.Operation | None:
        """As `sok.optimizers.Optimizer.apply_gradients`; afterwards adds 1 to `global_step` if one is given."""
        return count_after(super().apply_gradients(grads_and_vars, name, gradient_scale), global_step)
