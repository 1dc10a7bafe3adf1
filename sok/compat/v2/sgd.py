"""`SGD`: SOK v2's own optimizer."""

from __future__ import annotations

from typing import Any

from sok import optimizers
from sok.base.types import Rate
from sok.optimizers.global_step import CountsGlobalStep


class SGD(CountsGlobalStep, optimizers.SGD):
    """`sok.optimizers.SGD` with the arguments of SOK v2's `SGD`.

    Args:
        lr: the learning rate, as `sok.optimizers.SGD` takes it; so are `name` and `options`.

    Example:
        >>> import sok, tensorflow as tf
        >>> table = sok.Variable([[1.0], [1.0]])
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1, 1]))
        >>> sok.SGD(lr=0.25).apply_gradients([(tape.gradient(loss, table), table)])
        >>> table.numpy().tolist()
        [[1.0], [0.5]]

    Source: `SGD` of SOK v2.
    """

    def __init__(self, lr: Rate, name: str | None = None, **options: Any) -> None:
        super().__init__(lr, name=name, **options)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["lr"] = config.pop("learning_rate")
        return config

    @property
    def lr(self) -> Any:
        """`learning_rate`, settable."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Rate) -> None:
        self.learning_rate = value
