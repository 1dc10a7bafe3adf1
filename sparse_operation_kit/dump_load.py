"""`dump` and `load`, where SOK 2.1 has them."""

from sok import dump, load

__all__ = ["dump", "load"]
