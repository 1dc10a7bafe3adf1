"""Optimizers of embedding tables: one fused native op per table and step.

    optimizer = sok.optimizers.Adam(1e-3)
    optimizer.apply_gradients(zip(tape.gradient(loss, embedding_variables), embedding_variables))

`rule` makes one of a function of one's own, `matching_optimizer(stock)` the one that does to tables what a stock
TensorFlow or Keras optimizer would.
"""

from sok.optimizers.adadelta import Adadelta
from sok.optimizers.adagrad import Adagrad
from sok.optimizers.adam import Adam
from sok.optimizers.adamax import Adamax
from sok.optimizers.adamw import AdamW
from sok.optimizers.base import Optimizer
from sok.optimizers.ftrl import Ftrl
from sok.optimizers.group_ftrl import GroupFtrl
from sok.optimizers.lamb import Lamb
from sok.optimizers.lazy_adam import LazyAdam, LazyAdamOptimizer
from sok.optimizers.lion import Lion
from sok.optimizers.matching import matching_optimizer
from sok.optimizers.nadam import Nadam
from sok.optimizers.own import rule
from sok.optimizers.rmsprop import RMSprop
from sok.optimizers.rowwise import RowWiseAdagrad, RowWiseAdam
from sok.optimizers.sgd import SGD
from sok.optimizers.utils import split_embedding_variable_from_others

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "GroupFtrl",
    "Lamb",
    "LazyAdam",
    "LazyAdamOptimizer",
    "Lion",
    "Nadam",
    "Optimizer",
    "RMSprop",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "matching_optimizer",
    "rule",
    "split_embedding_variable_from_others",
]
