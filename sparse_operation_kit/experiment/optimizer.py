"""`OptimizerWrapper` and `SGD`, where SOK 1.1.4 had them."""

from sparse_operation_kit._alias import alias

alias(__name__, "sok.compat.v2.optimizer")
