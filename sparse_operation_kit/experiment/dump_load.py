"""`dump` and `load`, where SOK 1.2 had them."""

from sparse_operation_kit._alias import alias

alias(__name__, "sok.compat.formats.dump_load")
