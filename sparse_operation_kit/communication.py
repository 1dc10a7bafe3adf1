"""`sok.communication`."""

from sparse_operation_kit._alias import alias

alias(__name__, "sok.communication")
