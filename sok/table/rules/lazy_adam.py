"""Adam that leaves rows outside the batch alone."""

import dataclasses

from sok.table.rules.adam import ADAM

LAZY_ADAM = dataclasses.replace(ADAM, name="lazy_adam", decays=False, lazy="", equals=())
