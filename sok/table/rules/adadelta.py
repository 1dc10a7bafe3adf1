"""Adadelta."""

from sok.table.rules.rule import Hyper, RowRule, Slot, Stock, decay_rate

ADADELTA = RowRule(
    "adadelta",
    slots=(Slot("accum_grad"), Slot("accum_var")),
    hyper=(Hyper("rho", decay_rate), Hyper("epsilon")),
    decays=True,
    lazy="lazy_adadelta",
    dumped_as="Adadelta",
    equals=(
        Stock(
            ("keras.optimizers.Adadelta", "tf_keras.optimizers.Adadelta", "tf_keras.optimizers.legacy.Adadelta"),
        ),
        Stock(("tensorflow.compat.v1.train.AdadeltaOptimizer",), {"rho": "_rho", "epsilon": "_epsilon"}),
    ),
    formerly=(
        "Adadelta(accumulated_grad,accumulated_delta_var)",
        "Adadelta(accum_grad,accum_var)",
        "AdadeltaOptimizer(accum,accum_update)",
    ),
)
LAZY_ADADELTA = ADADELTA.lazily()
