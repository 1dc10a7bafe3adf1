"""Ftrl with a group lasso."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.ftrl import Ftrl


class GroupFtrl(Ftrl):
    """`sok.optimizers.Ftrl` whose rows become zero as a whole: n and z as there, and with s = clip(z, -l1, l1) - z

        w = max(0, 1 - l21 sqrt(D) / |s|) s / (n^-p / lr + 2 (l2 + beta / (2 lr)))

    where |s| is the norm over the row of D weights. With `l21_regularization_strength` 0 it is `Ftrl`. Rows outside the
    batch stay as they are.

    Args:
        l21_regularization_strength: how much a row's gradients must say before it is more than zero.
        *args, **options: those of `sok.optimizers.Ftrl`, and of `sok.optimizers.Optimizer`.

    Slots: `accumulator` (n), starting at `initial_accumulator_value`, and `linear` (z), starting at zero.

    Source: Yue et al., "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction" (2021).

    Example:
        >>> import sok
        >>> sok.optimizers.GroupFtrl(0.1, l21_regularization_strength=0.01).slot_names
        ('accumulator', 'linear')
    """

    rule = "group_ftrl"
    l21_regularization_strength: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        l21_regularization_strength: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> None:
        hyper = {"l21_regularization_strength": l21_regularization_strength}
        super().__init__(learning_rate, *args, hyper=hyper, **options)
