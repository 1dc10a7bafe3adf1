"""Ftrl."""

from sok.table.rules.rule import Hyper, RowRule, Slot, Stock, negative

_NAMES = (
    "initial_accumulator_value",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "l2_shrinkage_regularization_strength",
    "beta",
)

FTRL = RowRule(
    "ftrl",
    slots=(Slot("accumulator", start="initial_accumulator_value"), Slot("linear")),
    hyper=(Hyper("learning_rate_power", negative), *(Hyper(name) for name in _NAMES)),
    dumped_as="Ftrl",
    equals=(
        # They set rows that never had a gradient to zero, which nobody wants of rows that nobody has asked for.
        Stock(("keras.optimizers.Ftrl", "tf_keras.optimizers.Ftrl")),
        Stock(
            ("tf_keras.optimizers.legacy.Ftrl",),
            {
                "initial_accumulator_value": "_initial_accumulator_value",
                "l2_shrinkage_regularization_strength": "_l2_shrinkage_regularization_strength",
            },
        ),
        Stock(
            ("tensorflow.compat.v1.train.FtrlOptimizer",),
            {name: f"_{name}" for name in ("learning_rate_power", *_NAMES)},
        ),
    ),
    formerly=("Ftrl(accumulator,linear)", "FtrlOptimizer(accum,linear)"),
)
