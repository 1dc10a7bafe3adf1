"""Adagrad."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Adagrad(Optimizer):
    """Steps that shrink with the squares seen: `a += g^2; w -= learning_rate * g / sqrt(a + epsilon)`.

    Only the rows of the batch change, which is what stock Adagrad does on the equivalent dense table too. One slot,
    `a`, starting at `initial_accumulator_value`. Other arguments are those of `sok.optimizers.Optimizer`.

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods" (2011), with Keras' place for epsilon.
    """

    rule = "adagrad"
    initial_accumulator_value: float
    epsilon: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        name: str | None = None,
        **options: Any,
    ) -> None:
        hyper = {"initial_accumulator_value": initial_accumulator_value, "epsilon": epsilon}
        super().__init__(learning_rate, name, hyper=hyper, **options)
