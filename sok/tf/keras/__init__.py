"""Where SOK v1 had its optimizers: `sok.tf.keras.optimizers`."""

from sok.tf.keras import optimizers

__all__ = ["optimizers"]
