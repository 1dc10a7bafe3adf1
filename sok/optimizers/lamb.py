"""LAMB."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Lamb(Optimizer):
    """Adam's step, made as long as the row it changes. With m and v of `sok.optimizers.Adam` and t the number of steps:

        s = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay w
        w -= learning_rate |w| / |s| s

    Norms are those of the row; where one is zero their quotient is 1. (Keras' `Lamb` takes the norms of the whole
    variable.) Rows outside the batch stay as they are.

    Args:
        weight_decay: how much of the row the step has, before it is measured.
        **options: see `sok.optimizers.Optimizer`.

    Slots: m and v, starting at zero.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), with each row
    a layer of its own, as in FBGEMM.

    Example:
        >>> import sok
        >>> sok.optimizers.Lamb(0.01, weight_decay=0.01).slot_names
        ('m', 'v')
    """

    rule = "lamb"
    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        name: str | None = None,
        **options: Any,
    ) -> None:
        hyper = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "weight_decay": weight_decay}
        super().__init__(learning_rate, name, hyper=hyper, **options)
