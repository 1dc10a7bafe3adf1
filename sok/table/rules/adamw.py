"""Adam with decoupled weight decay."""

from sok.base.types import StockOptimizer
from sok.table.rules.adam import ADAM
from sok.table.rules.rule import Hyper, RowRule, Stock


def has_exceptions(stock: StockOptimizer) -> str:
    """Why weight decay is not that of all variables."""
    options = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern", "_exclude_from_weight_decay_names")
    if any(getattr(stock, option, None) for option in options):
        return "some variables are left out of its `weight_decay` (exclude_from_weight_decay)."
    return ""


ADAMW = RowRule(
    "adamw",
    slots=ADAM.slots,
    hyper=(*ADAM.hyper, Hyper("weight_decay")),
    decays=True,
    counts_steps=True,
    lazy="lazy_adamw",
    dumped_as="Adam",
    equals=(
        Stock(
            (
                *("keras.optimizers.AdamW", "tf_keras.optimizers.AdamW"),
                *("keras.optimizers.Adam", "tf_keras.optimizers.Adam"),
            ),
            requires=("weight_decay",),
            refuses=("amsgrad", "adaptive_epsilon"),
            unlike=has_exceptions,
        ),
    ),
)
LAZY_ADAMW = ADAMW.lazily()
