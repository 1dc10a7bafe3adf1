"""`OptimizerWrapper` and `SGD`, where SOK 2.1 has them."""

from sok import SGD, OptimizerWrapper

__all__ = ["SGD", "OptimizerWrapper"]
