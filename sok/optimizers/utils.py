"""`split_embedding_variable_from_others`, at the place where SOK v1 had it."""

from sok.table.splitting import split_embedding_variable_from_others

__all__ = ["split_embedding_variable_from_others"]
