"""The half of a distributed optimizer that trains the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sok.distributed.reduction import Pair, table_scale
from sok.distributed.tape import is_reduced
from sok.optimizers import Optimizer, matching_optimizer


class TableTrainer:
    """Applies gradients of tables with the optimizer given, or with one that matches the stock optimizer.

    Args:
        stock: the optimizer of everything else.
        given: a `sok.optimizers.Optimizer`, or None.
        op: 'average' or 'sum'.
        shares_iterations: whether a matching optimizer counts in the stock optimizer's `iterations`.
    """

    def __init__(self, stock: Any, given: Optimizer | None, op: str, shares_iterations: bool = True) -> None:
        if given is not None and not isinstance(given, Optimizer):
            raise TypeError(
                "`embedding_optimizer` must be one of sok.optimizers (SGD, Adagrad, Adam, LazyAdam), or None for the "
                f"one that matches. Received: {given!r}."
            )
        self._stock = stock
        self._optimizer = given
        self._op = op
        self.shares_iterations = shares_iterations and given is None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the tables. A matching one is made when first asked for.

        Raises:
            ValueError: there is none that matches.
        """
        if self._optimizer is None:
            self._optimizer = matching_optimizer(self._stock, share_iterations=self.shares_iterations)
        return self._optimizer

    @property
    def own_variables(self) -> list[Any]:
        """Variables of the tables' optimizer that the stock optimizer does not have: all of a given one."""
        if self._optimizer is None or self.shares_iterations:
            return []
        return list(self._optimizer.variables)

    def apply(self, pairs: Sequence[Pair], counts_step: bool, reduces: bool = True, scale: float = 1.0) -> Any:
        """Updates the tables; call it before the stock optimizer, whose `iterations` it may share.

        Args:
            pairs: gradients of tables with their variables; pairs without a gradient are left out.
            counts_step: whether nobody else will count this step.
            reduces: False if the gradients are scaled already.
            scale: another factor for the gradients.

        Returns:
            In a v1 graph the op to run, else None.
        """
        pairs = [pair for pair in pairs if pair[0] is not None]
        if not pairs:
            return None
        if reduces and any(is_reduced(grad) for grad, _ in pairs):
            raise ValueError(
                "These gradients come from a sok.DistributedGradientTape, which has reduced them over all workers, and "
                "sok.DistributedOptimizer would do so again. Use a tf.GradientTape with it, or stock optimizers and "
                "sok.optimizers with the distributed tape."
            )
        if reduces:
            scale *= table_scale(self._op)
        return self.optimizer._apply(
            pairs,
            gradient_scale=None if scale == 1.0 else scale,
            counts_step=counts_step or not self.shares_iterations,
        )


def serialize(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """Writes down a tables' optimizer that was given; None stays None."""
    return None if optimizer is None else {"class_name": type(optimizer).__name__, "config": optimizer.get_config()}


def deserialize(config: Any) -> Any:
    """The reverse of `serialize`; anything but its dictionaries is returned as it is."""
    if not isinstance(config, dict):
        return config
    from sok import optimizers

    return getattr(optimizers, config["class_name"]).from_config(config["config"])
