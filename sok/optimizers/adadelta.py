"""Adadelta."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Adadelta(Optimizer):
    """Steps as large as those before, by the gradients before.

        a = rho a + (1 - rho) g^2;   s = g sqrt(b + epsilon) / sqrt(a + epsilon);   b = rho b + (1 - rho) s^2
        w -= learning_rate s

    The slots of a dense table's rows all fade in each step, and its weights without a gradient stay: so do those of a
    table here, when they are next looked up, updated or exported.

    Args:
        rho: what a step leaves of the slots.
        epsilon: keeps from dividing by zero, and lets the first step be more than none.
        lazy: slots of rows outside the batch stay as they are.
        **options: see `sok.optimizers.Optimizer`.

    Slots: `accum_grad` (a) and `accum_var` (b), starting at zero.

    Source: Zeiler, "ADADELTA" (2012), with a learning rate as in Keras.
    """

    rules = ("adadelta", "lazy_adadelta")
    rho: float
    epsilon: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        name: str | None = None,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        self._choose("adadelta", lazy)
        super().__init__(learning_rate, name, hyper={"rho": rho, "epsilon": epsilon}, **options)
