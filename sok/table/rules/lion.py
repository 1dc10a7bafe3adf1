"""Lion."""

from sok.table.rules.rule import Hyper, RowRule, Slot, Stock, decay_rate

LION = RowRule(
    "lion",
    slots=(Slot("m"),),
    hyper=(Hyper("beta_1", decay_rate), Hyper("beta_2", decay_rate)),
    decays=True,
    lazy="lazy_lion",
    equals=(Stock(("keras.optimizers.Lion", "tf_keras.optimizers.Lion")),),
    formerly=("Lion(momentum)", "Lion(m)"),
)
LAZY_LION = LION.lazily()
