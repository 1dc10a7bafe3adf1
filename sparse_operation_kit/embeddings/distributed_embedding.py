"""`DistributedEmbedding`, where SOK 1.1 had it."""

from sok import DistributedEmbedding

__all__ = ["DistributedEmbedding"]
