"""SGD, with or without momentum."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class SGD(Optimizer):
    """Gradient descent: `w -= learning_rate * g`, or with momentum `v = momentum v - learning_rate g; w += v`.

    Without momentum only the rows of the batch change, and no slots are kept. With it a dense table's rows all move on
    by their momentum in each step: so do those of a table here, when they are next looked up, updated or exported.

    Args:
        momentum: what each step leaves of the one before, below 1. Above 0: one slot, `momentum`, starting at zero.
        nesterov: `w += momentum v - learning_rate g` instead.
        rate_in_velocity: False: v holds gradients and not steps, `v = momentum v + g; w -= learning_rate v`, as in
            `tf.compat.v1.train.MomentumOptimizer`: a new learning rate then acts on what is in v.
        lazy: with momentum or weight decay, rows outside the batch stay as they are.
        weight_decay: before each step `w -= learning_rate weight_decay w`, as in Keras, of all rows made so far.
            Times the learning rate it must be below 1. Above 0: one slot, as with momentum.
        **options: see `sok.optimizers.Optimizer`.

    Source: Polyak (1964); Nesterov's form as Sutskever et al. (2013) and Keras write it.

    Example:
        >>> import tensorflow as tf, sok
        >>> from sok.lookup.lookup import lookup_rows
        >>> table = sok.EmbeddingVariable(dim=2, capacity=8, initializer="ones", name="sgd_example")
        >>> optimizer = sok.optimizers.SGD(learning_rate=0.5)
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(lookup_rows(table, tf.constant([7, 7], tf.int64)))
        >>> optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        >>> table.sparse_read([7]).numpy().tolist()
        [[0.0, 0.0]]
    """

    rule = "sgd"
    rules = ("sgd", "momentum", "lazy_momentum", "sgdw", "lazy_sgdw")
    momentum: float = 0.0
    nesterov: bool = False
    rate_in_velocity: bool = True
    weight_decay: float = 0.0

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        name: str | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        rate_in_velocity: bool = True,
        lazy: bool = False,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        if weight_decay != 0:
            if not rate_in_velocity:
                raise ValueError("`rate_in_velocity` must be True with `weight_decay`. Received: False.")
            self._choose("sgdw", lazy)
            hyper = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
            super().__init__(learning_rate, name, hyper=hyper, **options)
            return
        if momentum == 0:
            super().__init__(learning_rate, name, **options)
            return
        self._choose("momentum", lazy)
        hyper = {"momentum": momentum, "nesterov": nesterov, "rate_in_velocity": rate_in_velocity}
        super().__init__(learning_rate, name, hyper=hyper, **options)

    @classmethod
    def _options_of(cls, rule: str) -> dict[str, Any]:
        return {} if rule == "sgd" else super()._options_of(rule)
