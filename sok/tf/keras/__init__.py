"""Where SOK v1 had its optimizers: `sok.tf.keras.optimizers`, and `sok.tf.keras.mixed_precision` around them."""

from sok.tf.keras import mixed_precision, optimizers

__all__ = ["mixed_precision", "optimizers"]
