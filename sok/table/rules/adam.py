"""Adam."""

from sok.table.rules.rule import Hyper, RowRule, Slot, Stock, decay_rate

V1_NAMES = {"beta_1": "_beta1", "beta_2": "_beta2", "epsilon": "_epsilon"}

ADAM = RowRule(
    "adam",
    slots=(Slot("m"), Slot("v")),
    hyper=(Hyper("beta_1", decay_rate), Hyper("beta_2", decay_rate), Hyper("epsilon")),
    decays=True,
    counts_steps=True,
    lazy="lazy_adam",
    dumped_as="Adam",
    equals=(
        Stock(
            (
                *("keras.optimizers.Adam", "tf_keras.optimizers.Adam", "tf_keras.optimizers.legacy.Adam"),
                *("keras.optimizers.AdamW", "tf_keras.optimizers.AdamW"),
            ),
            refuses=("amsgrad", "weight_decay", "adaptive_epsilon"),
        ),
        # Its epsilon is the paper's "epsilon hat", beside the uncorrected root: the form Keras uses too.
        Stock(("tensorflow.compat.v1.train.AdamOptimizer",), V1_NAMES),
    ),
)
LAZY_ADAM, LAZY_ADAM_BY_ROW = ADAM.lazily(), ADAM.lazily_by_row()
