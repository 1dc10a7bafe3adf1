"""AdamW."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay: before each step of `sok.optimizers.Adam`, `w -= learning_rate weight_decay w`.

    Rows outside the batch shrink too, and move on by their momentum, as those of a dense table, when they are next
    looked up, updated or exported. A row begins to shrink when it is made: a key that nobody has seen has its initial
    value.

    Args:
        weight_decay: times the learning rate it must be below 1.
        lazy: rows outside the batch stay as they are, and do not shrink.
        **options: see `sok.optimizers.Optimizer`.

    Slots: m and v, starting at zero.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), in Keras' form.
    """

    rules = ("adamw", "lazy_adamw")
    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str | None = None,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        self._choose("adamw", lazy)
        hyper = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "weight_decay": weight_decay}
        super().__init__(learning_rate, name, hyper=hyper, **options)
