"""`OptimizerScope`, where SOK 1.1 had it."""

from sok import OptimizerScope

__all__ = ["OptimizerScope"]
