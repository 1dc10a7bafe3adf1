"""RMSprop."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class RMSprop(Optimizer):
    """Steps over a running root mean square: `v = rho v + (1 - rho) g^2`, `w -= lr g / sqrt(v + epsilon)`.

    The rows of a dense table all fade in each step, and move on by their momentum if there is any: so do those of a
    table here, when they are next looked up, updated or exported.

    Args:
        rho: what a step leaves of v.
        momentum: above 0: `m = momentum m + step; w -= m`. One slot more.
        epsilon: keeps from dividing by zero.
        centered: `v - mean^2` in place of v, with `mean = rho mean + (1 - rho) g`. One slot more.
        epsilon_in_root: False: `sqrt(v) + epsilon`, as in `tf_keras.optimizers.legacy.RMSprop` without momentum.
        initial_velocity: what v starts as; 1 in `tf.compat.v1.train.RMSPropOptimizer`.
        lazy: rows outside the batch stay as they are.
        **options: see `sok.optimizers.Optimizer`.

    Slots: `velocity`, then `momentum` and `average_gradient` where asked for.

    Source: Hinton, "Neural Networks for Machine Learning", lecture 6e (2012); Graves (2013); in Keras' form.
    """

    rules = tuple(
        lazy + name
        for name in ("rmsprop", "rmsprop_momentum", "rmsprop_centered", "rmsprop_centered_momentum")
        for lazy in ("", "lazy_")
    )
    rho: float
    momentum: float
    epsilon: float
    epsilon_in_root: bool
    initial_velocity: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        name: str | None = None,
        epsilon_in_root: bool = True,
        initial_velocity: float = 0.0,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        self._choose("rmsprop" + "_centered" * bool(centered) + "_momentum" * (momentum != 0), lazy)
        hyper = {
            "momentum": momentum,
            "rho": rho,
            "epsilon": epsilon,
            "epsilon_in_root": epsilon_in_root,
            "initial_velocity": initial_velocity,
        }
        super().__init__(learning_rate, name, hyper=hyper, **options)

    @property
    def centered(self) -> bool:
        return "centered" in self.rule

    @classmethod
    def _options_of(cls, rule: str) -> dict[str, Any]:
        return {"centered": "centered" in rule, **super()._options_of(rule)}
