"""`sok.tf`, also where SOK 1.1 had its optimizers for `tf.keras`."""

from sparse_operation_kit._alias import alias

alias(
    __name__,
    "sok.tf",
    "keras",
    "keras.optimizers",
    "keras.optimizers.adam",
    "keras.optimizers.lazy_adam",
)
