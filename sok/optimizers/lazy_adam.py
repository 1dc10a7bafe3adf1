"""Adam that does not change rows outside the batch."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.adam import Adam
from sok.optimizers.global_step import CountsGlobalStep


class LazyAdam(Adam):
    """`sok.optimizers.Adam` without decay of untouched rows: only the rows of the batch change.

    Bias correction counts the optimizer's steps, as tf.contrib's LazyAdamOptimizer did, unless it is told otherwise
    (`bias_correction="row"`). The arguments are those of `sok.optimizers.Adam`, of which it is the one with
    `lazy=True`.
    """

    rule = "lazy_adam"
    rules = ("lazy_adam",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"lazy": True, **options})

    @classmethod
    def _options_of(cls, rule: str) -> dict[str, Any]:
        options = super()._options_of(rule)
        del options["lazy"]
        return options


class LazyAdamOptimizer(CountsGlobalStep, LazyAdam):
    """`LazyAdam` with the arguments and defaults of tf.contrib's class of that name (`beta1`, `beta2`, epsilon 1e-8).

    `use_locking` is accepted and has no meaning: updates of a table never overlap.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str | None = None,
        *,
        beta_1: float | None = None,
        beta_2: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1=beta1 if beta_1 is None else beta_1,
            beta_2=beta2 if beta_2 is None else beta_2,
            epsilon=epsilon,
            name=name,
            **options,
        )
