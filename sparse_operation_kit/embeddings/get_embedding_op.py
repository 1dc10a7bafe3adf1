"""`get_embedding`, where SOK 1.1 had it."""

from sok import get_embedding

__all__ = ["get_embedding"]
