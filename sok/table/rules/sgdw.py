"""SGD with decoupled weight decay."""

from sok.table.rules.adamw import has_exceptions
from sok.table.rules.momentum import MOMENTUM
from sok.table.rules.rule import Hyper, RowRule, Stock, decay_rate, flag

SGDW = RowRule(
    "sgdw",
    slots=MOMENTUM.slots,
    hyper=(Hyper("momentum", decay_rate), Hyper("nesterov", flag), Hyper("weight_decay")),
    decays=True,
    lazy="lazy_sgdw",
    dumped_as="SGD",
    equals=(
        Stock(("keras.optimizers.SGD", "tf_keras.optimizers.SGD"), requires=("weight_decay",), unlike=has_exceptions),
    ),
)
LAZY_SGDW = SGDW.lazily()
