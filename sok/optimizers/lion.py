"""Lion."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Lion(Optimizer):
    """Steps of one size: `w -= learning_rate sign(beta_1 m + (1 - beta_1) g); m = beta_2 m + (1 - beta_2) g`.

    A dense table's rows go on by the sign of their momentum in every step, with or without a gradient, and so do those
    of a table here, when they are next looked up, updated or exported. For rows that are seldom in a batch that is
    rarely wanted: see `lazy`. A row that misses so many steps that its momentum is too small for a float32 (8,700 for a
    momentum of 1 and the default `beta_2`) stands still in stock Keras from then on, and goes on here.

    Args:
        lazy: rows outside the batch stay as they are.
        **options: see `sok.optimizers.Optimizer`.

    One slot, m, starting at zero.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), in Keras' form.
    """

    rules = ("lion", "lazy_lion")
    beta_1: float
    beta_2: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        name: str | None = None,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        self._choose("lion", lazy)
        super().__init__(learning_rate, name, hyper={"beta_1": beta_1, "beta_2": beta_2}, **options)
