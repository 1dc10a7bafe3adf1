"""Nadam."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Nadam(Optimizer):
    """Adam with Nesterov's momentum, whose weight grows over the first steps.

    With t the number of steps, u(t) = beta_1 (1 - 0.96^(schedule_decay t) / 2), p(t) = u(1) .. u(t), and m and v of
    `sok.optimizers.Adam`:

        w -= learning_rate (u(t+1) m / (1 - p(t+1)) + (1 - u(t)) g / (1 - p(t))) / (sqrt(v / (1 - beta_2^t)) + epsilon)

    Rows outside the batch move on by their momentum, as those of a dense table, when they are next looked up, updated
    or exported. That is done step by step, some 200 of them at most with the default `beta_1`.

    Args:
        schedule_decay: 0.004 in `tf_keras.optimizers.legacy.Nadam`.
        lazy: rows outside the batch stay as they are.
        **options: see `sok.optimizers.Optimizer`.

    Slots: m and v, starting at zero.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam" (2016), in Keras' form.
    """

    rules = ("nadam", "lazy_nadam")
    beta_1: float
    beta_2: float
    epsilon: float
    schedule_decay: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str | None = None,
        schedule_decay: float = 1.0,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        self._choose("nadam", lazy)
        hyper = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "schedule_decay": schedule_decay}
        super().__init__(learning_rate, name, hyper=hyper, **options)
