"""`dump` and `load`, where SOK 2.1 has them."""

from sparse_operation_kit._alias import alias

alias(__name__, "sok.compat.formats.dump_load")
