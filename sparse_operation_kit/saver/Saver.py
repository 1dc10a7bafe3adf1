"""`Saver`, where SOK 1.1 had it."""

from sok import Saver

__all__ = ["Saver"]
