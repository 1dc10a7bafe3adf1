"""`Variable` and its two kinds, where SOK 2.1 has them."""

from sok import DistributedVariable, LocalizedVariable, Variable

__all__ = ["DistributedVariable", "LocalizedVariable", "Variable"]
