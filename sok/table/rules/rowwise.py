"""Rules that keep one number for the squared gradients of a whole row."""

from collections.abc import Mapping

from sok.table.rules.adam import ADAM
from sok.table.rules.rule import Hyper, RowRule, Slot


def _divides_by_zero(hyper: Mapping[str, float]) -> str:
    if hyper["initial_accumulator_value"] + hyper["epsilon"] > 0:
        return ""
    return "One of `initial_accumulator_value` and `epsilon` must be above 0: a zero gradient would divide 0 by 0."


ROWWISE_ADAGRAD = RowRule(
    "rowwise_adagrad",
    slots=(Slot("accumulator", start="initial_accumulator_value", scalar=True),),
    hyper=(Hyper("initial_accumulator_value"), Hyper("epsilon")),
    needs_whole_row=True,
    error=_divides_by_zero,
)
ROWWISE_ADAM = RowRule(
    "rowwise_adam",
    slots=(Slot("m"), Slot("v", scalar=True)),
    hyper=ADAM.hyper,
    counts_steps=True,
    needs_whole_row=True,
)
