"""`Variable`, where SOK 2.1 has it."""

from sok import Variable

__all__ = ["Variable"]
