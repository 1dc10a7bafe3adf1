"""`OptimizerWrapper` and `SGD`, in a module of the name that SOK 2.1 gives it."""

from sok.optimizers.wrapper import OptimizerWrapper
from sok.v2.sgd import SGD

__all__ = ["SGD", "OptimizerWrapper"]
