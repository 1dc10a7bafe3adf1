"""Adagrad and Adam with one number for the squared gradients of a row."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator for all of a row: 4 bytes a row, whatever its width.

        a += mean(g^2);   w -= learning_rate g / (sqrt(a) + epsilon)

    The mean is over the columns of the row. Rows outside the batch do not change.

    Args:
        initial_accumulator_value: a of a row that no step has touched.
        epsilon: beside the root. Above 0 if the initial value is 0.
        **options: see `sok.optimizers.Optimizer`.

    Slot: accumulator, one number a row.

    Source: FBGEMM's and TorchRec's exact row-wise Adagrad.

    Example:
        >>> import sok
        >>> optimizer = sok.optimizers.RowWiseAdagrad(0.1)
        >>> optimizer.rule, optimizer.slot_names
        ('rowwise_adagrad', ('accumulator',))
    """

    rule = "rowwise_adagrad"
    initial_accumulator_value: float
    epsilon: float

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-8,
        name: str | None = None,
        **options: Any,
    ) -> None:
        hyper = {"initial_accumulator_value": initial_accumulator_value, "epsilon": epsilon}
        super().__init__(learning_rate, name, hyper=hyper, **options)


class RowWiseAdam(Optimizer):
    """Adam with one v for all of a row, of the mean of its squared gradients. m is a vector. At step t

        m += (g - m) (1 - beta_1);   v += (mean(g^2) - v) (1 - beta_2)
        w -= learning_rate m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon)

    Rows outside the batch stay as they are.

    Args:
        epsilon: beside the corrected root, where `sok.optimizers.Adam` has it beside the uncorrected one.
        **options: see `sok.optimizers.Optimizer`.

    Slots: m, and v, one number a row. Both start at zero.

    Source: FBGEMM's partial row-wise Adam.

    Example:
        >>> import sok
        >>> sok.optimizers.RowWiseAdam(0.01).slot_names
        ('m', 'v')
    """

    rule = "rowwise_adam"
    beta_1: float
    beta_2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        name: str | None = None,
        **options: Any,
    ) -> None:
        hyper = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
        super().__init__(learning_rate, name, hyper=hyper, **options)
