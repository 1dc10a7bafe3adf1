"""SGD with momentum, or Nesterov's form of it."""

from sok.table.rules.rule import Hyper, RowRule, Slot, Stock, decay_rate, flag

MOMENTUM = RowRule(
    "momentum",
    slots=(Slot("momentum"),),
    hyper=(Hyper("momentum", decay_rate), Hyper("nesterov", flag), Hyper("rate_in_velocity", flag)),
    decays=True,
    lazy="lazy_momentum",
    dumped_as="SGD",
    equals=(
        Stock(("keras.optimizers.SGD", "tf_keras.optimizers.SGD"), {"rate_in_velocity": 1.0}, requires=("momentum",)),
        Stock(("tf_keras.optimizers.legacy.SGD",), {"rate_in_velocity": 1.0}, requires=("_momentum",)),
        Stock(
            ("tensorflow.compat.v1.train.MomentumOptimizer",),
            {"momentum": "_momentum", "nesterov": "_use_nesterov", "rate_in_velocity": 0.0},
        ),
    ),
    formerly=("SGD(momentum)", "SGD(m)", "MomentumOptimizer(momentum)"),
)
LAZY_MOMENTUM = MOMENTUM.lazily()
