"""Rules that keep one number for the squared gradients of a whole row."""

from sok.table.rules.adagrad import divides_by_zero
from sok.table.rules.adam import ADAM
from sok.table.rules.rule import Hyper, RowRule, Slot

ROWWISE_ADAGRAD = RowRule(
    "rowwise_adagrad",
    slots=(Slot("accumulator", start="initial_accumulator_value", scalar=True),),
    hyper=(Hyper("initial_accumulator_value"), Hyper("epsilon")),
    needs_whole_row=True,
    error=divides_by_zero,
)
ROWWISE_ADAM = RowRule(
    "rowwise_adam",
    slots=(Slot("m"), Slot("v", scalar=True)),
    hyper=ADAM.hyper,
    counts_steps=True,
    needs_whole_row=True,
)
