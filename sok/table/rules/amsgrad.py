"""AMSGrad: Adam whose denominator never shrinks."""

from sok.table.rules.adam import ADAM
from sok.table.rules.rule import RowRule, Slot, Stock

AMSGRAD = RowRule(
    "amsgrad",
    slots=(*ADAM.slots, Slot("vhat")),
    hyper=ADAM.hyper,
    decays=True,
    counts_steps=True,
    lazy="lazy_amsgrad",
    dumped_as="Adam",
    equals=(
        Stock(
            ("keras.optimizers.Adam", "tf_keras.optimizers.Adam", "tf_keras.optimizers.legacy.Adam"),
            requires=("amsgrad",),
            refuses=("weight_decay", "adaptive_epsilon"),
        ),
    ),
    formerly=("Adam(momentum,velocity,velocity_hat)", "Adam(m,v,vhat)"),
)
LAZY_AMSGRAD = AMSGRAD.lazily()
