"""`LazyAdamOptimizer`, with the arguments of tf.contrib's class of that name."""

from sok.optimizers import LazyAdamOptimizer

__all__ = ["LazyAdamOptimizer"]
