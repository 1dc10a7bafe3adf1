"""`EmbeddingVariable`, where SOK 1.1 had it."""

from sok import EmbeddingVariable

__all__ = ["EmbeddingVariable"]
