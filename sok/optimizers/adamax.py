"""Adamax."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Adamax(Optimizer):
    """Adam whose denominator is the largest gradient so far, fading.

        m += (g - m) (1 - beta_1);   v = max(beta_2 v, |g|);   w -= learning_rate / (1 - beta_1^t) m / (v + epsilon)

    with t the number of steps. Rows outside the batch move on by their momentum, as those of a dense table, when they
    are next looked up, updated or exported.

    Args:
        lazy: rows outside the batch stay as they are.
        bias_correction: "step": by the number of the optimizer's steps. "row": by the number of the row's own, which
            the table counts, as OpenEmbedding does; with `lazy` alone.
        **options: see `sok.optimizers.Optimizer`.

    Slots: m and v, starting at zero; with `bias_correction="row"` also count, one number a row.

    Source: Kingma and Ba, "Adam" (2015), section 7.1, in Keras' form.
    """

    rules = ("adamax", "lazy_adamax", "lazy_adamax_by_row")
    beta_1: float
    beta_2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str | None = None,
        lazy: bool = False,
        bias_correction: str = "step",
        **options: Any,
    ) -> None:
        self._choose("adamax", lazy, bias_correction)
        hyper = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
        super().__init__(learning_rate, name, hyper=hyper, **options)
