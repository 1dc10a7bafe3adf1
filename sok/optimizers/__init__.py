"""Optimizers of embedding tables: one fused native op per table and step.

    optimizer = sok.optimizers.Adam(1e-3)
    optimizer.apply_gradients(zip(tape.gradient(loss, embedding_variables), embedding_variables))

`rule` makes one of a function of one's own, `matching_optimizer(stock)` the one that does to tables what a stock
TensorFlow or Keras optimizer would.
"""

from sok.optimizers.adagrad import Adagrad
from sok.optimizers.adam import Adam
from sok.optimizers.base import Optimizer
from sok.optimizers.lazy_adam import LazyAdam, LazyAdamOptimizer
from sok.optimizers.matching import matching_optimizer
from sok.optimizers.own import rule
from sok.optimizers.sgd import SGD
from sok.optimizers.utils import split_embedding_variable_from_others

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "LazyAdam",
    "LazyAdamOptimizer",
    "Optimizer",
    "matching_optimizer",
    "rule",
    "split_embedding_variable_from_others",
]
