"""`Variable` and its two kinds, where SOK 1.1.4 had them."""

from sparse_operation_kit._alias import alias

alias(__name__, "sparse_operation_kit.distributed_variable")
