"""Adagrad."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer
from sok.optimizers.checks import not_negative


class Adagrad(Optimizer):
    """Steps that shrink with the squares seen: `a += g^2; w -= learning_rate * g / sqrt(a + epsilon)`.

    Only the rows of the batch change, which is what stock Adagrad does on the equivalent dense table too. One slot,
    `a`, starting at `initial_accumulator_value`. Other arguments are those of `sok.optimizers.Optimizer`.

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods" (2011), with Keras' place for epsilon.
    """

    rule = "adagrad"

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        name: str | None = None,
        **options: Any,
    ) -> None:
        self.initial_accumulator_value = not_negative("initial_accumulator_value", initial_accumulator_value)
        self.epsilon = not_negative("epsilon", epsilon)
        if self.initial_accumulator_value + self.epsilon == 0:
            raise ValueError(
                "One of `initial_accumulator_value` and `epsilon` must be above 0: a zero gradient would divide 0 by 0."
            )
        super().__init__(learning_rate, name, **options)

    @property
    def slot_inits(self) -> tuple[float, ...]:
        return (self.initial_accumulator_value,)

    def _hyper(self) -> list[float]:
        return [self.initial_accumulator_value, self.epsilon]

    def _rule_config(self) -> dict[str, Any]:
        return {"initial_accumulator_value": self.initial_accumulator_value, "epsilon": self.epsilon}
