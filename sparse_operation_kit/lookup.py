"""`sok.lookup`, where SOK 2.1 has `lookup_sparse` and `all2all_dense_embedding`."""

from sparse_operation_kit._alias import alias

alias(__name__, "sok.lookup")
