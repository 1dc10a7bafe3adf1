"""`lookup_sparse` and `all2all_dense_embedding`, where SOK 2.1 has them."""

from sok import all2all_dense_embedding, lookup_sparse

__all__ = ["all2all_dense_embedding", "lookup_sparse"]
