"""Nadam: Adam with Nesterov's momentum."""

from sok.table.rules.adam import ADAM
from sok.table.rules.rule import Hyper, RowRule, Stock

NADAM = RowRule(
    "nadam",
    slots=ADAM.slots,
    hyper=(*ADAM.hyper, Hyper("schedule_decay")),
    decays=True,
    counts_steps=True,
    lazy="lazy_nadam",
    equals=(
        Stock(("keras.optimizers.Nadam", "tf_keras.optimizers.Nadam"), {"schedule_decay": 1.0}),
        Stock(("tf_keras.optimizers.legacy.Nadam",), {"schedule_decay": "_initial_decay"}),
    ),
    formerly=("Nadam(momentum,velocity)", "Nadam(m,v)"),
)
LAZY_NADAM = NADAM.lazily()
