"""Adam that leaves rows outside the batch alone."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.optimizers.adam import Adam
from sok.optimizers.global_step import count_after


class LazyAdam(Adam):
    """`sok.optimizers.Adam` without decay of untouched rows: only the rows of the batch change.

    Bias correction counts the optimizer's steps, not the row's, as tf.contrib's LazyAdamOptimizer did. The arguments
    are those of `sok.optimizers.Adam`.
    """

    rule = "lazy_adam"


class LazyAdamOptimizer(LazyAdam):
    """`LazyAdam` with the arguments and defaults of tf.contrib's class of that name (`beta1`, `beta2`, epsilon 1e-8).

    `use_locking` is accepted and has no meaning: updates of a table never overlap.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str | None = None,
        *,
        beta_1: float | None = None,
        beta_2: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1=beta1 if beta_1 is None else beta_1,
            beta_2=beta2 if beta_2 is None else beta_2,
            epsilon=epsilon,
            name=name,
            **options,
        )

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: tf.Variable | None = None,
        name: str | None = None,
        gradient_scale: Any = None,
    ) -> tf.Operation | None:
        """As `Optimizer.apply_gradients`; afterwards adds 1 to `global_step` if one is given."""
        return count_after(super().apply_gradients(grads_and_vars, name, gradient_scale), global_step)
