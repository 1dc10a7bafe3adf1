"""Adam that leaves rows outside the batch alone."""

from sok.table.rules.adam import ADAM

LAZY_ADAM = ADAM.lazily()
