"""`All2AllDenseEmbedding`, where SOK 1.1 had it."""

from sok import All2AllDenseEmbedding

__all__ = ["All2AllDenseEmbedding"]
