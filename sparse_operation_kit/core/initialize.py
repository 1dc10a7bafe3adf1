"""`Init`, where SOK 1.1 had it."""

from sok import Init

__all__ = ["Init"]
