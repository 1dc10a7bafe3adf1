"""SGD."""

from sok.table.rules.rule import RowRule, Stock

SGD = RowRule(
    "sgd",
    dumped_as="SGD",
    equals=(
        # Without momentum all of them do the same with `nesterov`.
        Stock(("keras.optimizers.SGD", "tf_keras.optimizers.SGD"), refuses=("momentum",)),
        Stock(("tf_keras.optimizers.legacy.SGD",), refuses=("_momentum",)),
        Stock(("tensorflow.compat.v1.train.GradientDescentOptimizer",)),
    ),
)
