"""Adamax: Adam by the largest gradient."""

from sok.table.rules.adam import ADAM
from sok.table.rules.rule import RowRule, Slot, Stock

ADAMAX = RowRule(
    "adamax",
    slots=(Slot("m"), Slot("v")),
    hyper=ADAM.hyper,
    decays=True,
    counts_steps=True,
    lazy="lazy_adamax",
    dumped_as="Adam",
    equals=(Stock(("keras.optimizers.Adamax", "tf_keras.optimizers.Adamax", "tf_keras.optimizers.legacy.Adamax")),),
    formerly=("Adamax(momentum,norm)", "Adamax(m,u)", "Adamax(m,v)"),
)
LAZY_ADAMAX, LAZY_ADAMAX_BY_ROW = ADAMAX.lazily(), ADAMAX.lazily_by_row()
