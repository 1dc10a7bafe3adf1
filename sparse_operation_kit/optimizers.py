"""`sok.optimizers`, also where SOK 1.1 had its optimizers."""

from sparse_operation_kit._alias import alias

alias(__name__, "sok.optimizers", "utils")
