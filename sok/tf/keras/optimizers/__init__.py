"""Optimizers at the places where SOK v1 had them."""

from sok.tf.keras.optimizers.adam import Adam
from sok.tf.keras.optimizers.lazy_adam import LazyAdamOptimizer

__all__ = ["Adam", "LazyAdamOptimizer"]
