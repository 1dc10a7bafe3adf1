"""Ftrl."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Ftrl(Optimizer):
    """Follow the regularized leader, with the options of Keras. With n and z the slots, and lr the learning rate:

        z += g + 2 l2_shrinkage w - ((n + g^2)^-p - n^-p) / lr w;   n += g^2
        w = (clip(z, -l1, l1) - z) / (n^-p / lr + 2 (l2 + beta / (2 lr)))

    p is `learning_rate_power`. Rows outside the batch stay as they are; Keras, on a dense table, sets those that never
    had a gradient to zero, and moves others when the learning rate changes.

    Args:
        learning_rate: above 0, since it is divided by.
        **options: see `sok.optimizers.Optimizer`.

    Slots: `accumulator` (n), starting at `initial_accumulator_value`, and `linear` (z), starting at zero.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches" (2013), in Keras' form.
    """

    rule = "ftrl"
    learning_rate_power: float
    initial_accumulator_value: float
    l1_regularization_strength: float
    l2_regularization_strength: float
    l2_shrinkage_regularization_strength: float
    beta: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        name: str | None = None,
        **options: Any,
    ) -> None:
        hyper = {
            "learning_rate_power": learning_rate_power,
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
            "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
            "beta": beta,
        }
        super().__init__(learning_rate, name, hyper={**hyper, **options.pop("hyper", {})}, **options)
