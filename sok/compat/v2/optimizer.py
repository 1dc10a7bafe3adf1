"""`OptimizerWrapper` and `SGD`, in a module of the name that SOK 2.1 gives it."""

from sok.compat.v2.sgd import SGD
from sok.optimizers.wrapper import OptimizerWrapper

__all__ = ["SGD", "OptimizerWrapper"]
