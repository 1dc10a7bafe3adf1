"""`DynamicVariable`, `assign` and `export`, where SOK 2.1 has them."""

from sok import DynamicVariable, assign, export

__all__ = ["DynamicVariable", "assign", "export"]
