"""SGD."""

from sok.table.rules.rule import RowRule, Stock

SGD = RowRule(
    "sgd",
    dumped_as="SGD",
    equals=(
        Stock(("keras.optimizers.SGD", "tf_keras.optimizers.SGD"), refuses=("momentum", "nesterov")),
        Stock(("tf_keras.optimizers.legacy.SGD",), refuses=("_momentum", "nesterov")),
        Stock(("tensorflow.compat.v1.train.GradientDescentOptimizer",)),
    ),
)
