"""Stock optimizers that have no equal in `sok.optimizers`, run by themselves on the rows that a step has touched.

The distinct rows of a batch are put into a dense variable, their slots into others, a copy of the stock optimizer does
its step on these, and all of it goes back into the table. Rows outside the batch are left alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import numbers
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.job.transport.base import run_now
from sok.optimizers import gradients
from sok.optimizers.base import Optimizer
from sok.optimizers.learning_rate import GraphConstantRate
from sok.optimizers.matching import (
    _class_of,
    _follow_iterations,
    _keras_rate,
    _legacy_rate,
    _NoMatch,
    _refuse,
    is_legacy,
    v1_rate,
)

# Optimizers that treat each element by itself.
_KERAS = ("SGD", "RMSprop", "Adadelta", "Adamax", "Nadam", "Adam", "Lion", "Ftrl")
_LEGACY = ("SGD", "RMSprop", "Adadelta", "Adamax", "Nadam", "Adam", "Ftrl")
_V1 = ("MomentumOptimizer", "RMSPropOptimizer", "AdadeltaOptimizer", "FtrlOptimizer")


class Buffered(Optimizer):
    """Trains tables by copies of a stock optimizer; its slots lie in the tables, like those of `sok.optimizers`.

    The rule is known to tables by the stock optimizer's class and the names of its slots: 'RMSprop(velocity,momentum)'.
    All copies count in `iterations`, and use the learning rate of the stock optimizer itself.

    Args:
        stock: one of those that `check` accepts.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        with tf.init_scope(), tf.device("CPU:0"):
            super().__init__(_rate_of(stock), type(stock).__name__)
            probe = _Copy(stock, 1)
            if not isinstance(stock, tf.compat.v1.train.Optimizer):
                _follow_iterations(self, stock, share=False)
        self.rule = f"{type(stock).__name__}({','.join(slot.name for slot in probe.slots)})"
        self._slot_inits = tuple(slot.start for slot in probe.slots)
        self._of_tables: weakref.WeakKeyDictionary[Any, _Copy] = weakref.WeakKeyDictionary()

    @property
    def stock(self) -> Any:
        """The stock optimizer."""
        return self._stock

    @property
    def slot_inits(self) -> tuple[float, ...]:
        return self._slot_inits

    def get_config(self) -> dict[str, Any]:
        raise TypeError("What trains tables by a stock optimizer has no config of its own: take the stock optimizer's.")

    def _update(self, ready: list[gradients.TableGradient], step: tf.Tensor, hyper: tf.Tensor) -> Any:
        rate = tf.cast(hyper[0], tf.float32)
        is_legal = tf.logical_and(tf.math.is_finite(rate), rate >= 0)
        text = "the learning rate must be finite in float32 and not negative. Nothing was updated. Received:"
        check = tf.debugging.Assert(is_legal, [text, hyper[0]])
        with tf.control_dependencies(_ops_of([check])):
            done = [self._update_table(g, step - 1) for g in ready]
        return None if tf.executing_eagerly() else tf.group(*_ops_of(done))

    def _update_table(self, g: gradients.TableGradient, iterations: tf.Tensor) -> Any:
        lib, table = _ops.lib(), g.variable
        place = {
            "dim": table.dim,
            "rule": self.rule,
            "slot_set": self.slot_set,
            "slot_inits": self.slot_inits,
        }
        if table not in self._of_tables:
            with tf.init_scope(), tf.device("CPU:0"):
                self._of_tables[table] = _Copy(self._stock, table.dim)
        row_ids, grads = (g.row_ids, g.values) if g.distinct else lib.sok_sum_duplicates(g.row_ids, g.values)
        # Negative: of lookups without training, which made no row.
        row_ids, grads = tf.boolean_mask(row_ids, row_ids >= 0), tf.boolean_mask(grads, row_ids >= 0)
        rows, slots = lib.sok_table_gather(table.handle, row_ids, **place)
        rows, slots = self._of_tables[table].step(grads, rows, slots, iterations)
        return lib.sok_table_scatter(table.handle, row_ids, rows, slots, **place)


def _rate_of(stock: Any) -> Any:
    """The learning rate of a stock optimizer itself."""
    if not isinstance(stock, tf.compat.v1.train.Optimizer):
        return _legacy_rate(stock) if is_legacy(stock) else _keras_rate(stock)
    rate = v1_rate(stock)
    # Nobody can set it: a variable of ours would be saved, and restored to no effect.
    return GraphConstantRate(float(rate)) if isinstance(rate, numbers.Real) else rate


def check(stock: Any) -> None:
    """Raises `_NoMatch`, with a sentence, if `Buffered` cannot do what `stock` does."""
    for library, path, names in (
        ("keras", "optimizers", _KERAS),
        ("tf_keras", "optimizers", _KERAS),
        ("tf_keras", "optimizers.legacy", _LEGACY),
        ("tensorflow", "compat.v1.train", _V1),
    ):
        if any(type(stock) is _class_of(library, f"{path}.{name}") for name in names):
            # What is measured over a whole gradient, or moves what is not in the batch.
            _refuse(stock, "clipnorm", "global_clipnorm", "weight_decay", "use_ema", "gradient_accumulation_steps")
            _refuse(stock, "gradient_transformers")
            return
    raise _NoMatch(
        "known are exactly SGD, Adagrad, Adam, RMSprop, Adadelta, Adamax, Nadam and Ftrl of Keras 3, tf_keras and "
        "tf_keras.optimizers.legacy (of the first two also Lion), and GradientDescentOptimizer, MomentumOptimizer, "
        "AdagradOptimizer, AdamOptimizer, RMSPropOptimizer, AdadeltaOptimizer and FtrlOptimizer of tf.compat.v1.train."
    )


_WEIGHTS = "sok_rows"


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One slot of the rows of a batch."""

    name: str
    buffer: tf.Variable  # [U, D]
    start: float  # what it is of a row that no step has touched


class _Copy:
    """A copy of a stock optimizer that does its steps on the rows of a batch, kept in variables of any size."""

    def __init__(self, stock: Any, dim: int) -> None:
        self._weights = tf.Variable(
            tf.zeros([1, dim]), trainable=False, shape=[None, dim], name=_WEIGHTS, **_not_saved()
        )
        made: list[tuple[tf.Variable, float]] = []
        with _slots_of_any_size(dim, made), _as_one_row(self._weights):
            self._optimizer, self._step = _copy_of(stock, self._weights)
        self.slots = [
            _Slot(_slot_name(self._optimizer, self._weights, buffer), buffer, start) for buffer, start in made
        ]

    def step(
        self, grads: tf.Tensor, rows: tf.Tensor, slots: tf.Tensor, iterations: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows [U, D] and slots [U, K * D] after the step that comes after `iterations` steps."""
        parts = tf.split(slots, len(self.slots), axis=1)
        filled = [self._weights.assign(rows, read_value=False)]
        filled += [slot.buffer.assign(part, read_value=False) for slot, part in zip(self.slots, parts, strict=True)]
        filled += _set_counters(self._optimizer, iterations)
        with tf.control_dependencies(_ops_of(filled)):
            stepped = self._step(tf.identity(grads))
        with tf.control_dependencies(_ops_of([stepped])):
            return self._weights.read_value(), tf.concat([slot.buffer.read_value() for slot in self.slots], 1)


def _slot_name(optimizer: Any, weights: tf.Variable, buffer: tf.Variable) -> str:
    """What the optimizer calls a slot: 'momentum'."""
    if hasattr(optimizer, "get_slot_names"):  # tf.compat.v1.train, and legacy ones
        return next(name for name in optimizer.get_slot_names() if optimizer.get_slot(weights, name) is buffer)
    # Keras makes one name of those of the variable and of the slot: 'sok_rows_momentum:0', 'm/sok_rows:0'.
    words = re.sub(rf"{_WEIGHTS}(_\d+)?(:0)?", "", buffer.name.removesuffix(":0")).split("/")
    return [word.strip("_") for word in words if word.strip("_")][-1]


def _assign(variable: Any, value: tf.Tensor) -> Any:
    # Keras' own variables know no read_value.
    return variable.assign(value, read_value=False) if isinstance(variable, tf.Variable) else variable.assign(value)


def _set_counters(optimizer: Any, iterations: tf.Tensor) -> list[Any]:
    """Has an optimizer count from here: what it keeps besides slots follows from the number of steps done."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return []  # those that we take count nothing
    counted = [_assign(optimizer.iterations, tf.cast(iterations, tf.int64))]
    if type(optimizer).__name__ == "Nadam":
        # The product of its momenta so far, which fades into nothing: later factors change no float32.
        speed = getattr(optimizer, "_initial_decay", 1.0)
        product = getattr(optimizer, "_m_cache", None)
        product = optimizer._u_product if product is None else product
        beta_1 = optimizer._get_hyper("beta_1", tf.float32) if hasattr(optimizer, "_get_hyper") else optimizer.beta_1
        steps = tf.range(1.0, tf.cast(tf.minimum(iterations, 1 << 20), tf.float32) + 1.0)
        counted.append(_assign(product, tf.reduce_prod(beta_1 * (1.0 - 0.5 * tf.pow(0.96, speed * steps)))))
    return counted


def _ops_of(results: list[Any]) -> list[Any]:
    """What to wait for, of operations' results in a graph; eagerly nothing."""
    return [result for result in results if isinstance(result, (tf.Operation, tf.Tensor))]


def _not_saved() -> dict[str, Any]:
    """For a variable of a v1 graph that is written before it is read, always: neither initialised nor saved."""
    return {} if tf.executing_eagerly() else {"collections": []}


@contextlib.contextmanager
def _slots_of_any_size(dim: int, made: list[tuple[tf.Variable, float]]) -> Iterator[None]:
    """Inside, variables [1, dim] are made as [None, dim], and listed with the number that they start as."""

    def create(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        given = kwargs["initial_value"]
        # A function may calculate with constants, which a graph under construction does not.
        value = run_now(given) if callable(given) else tf.get_static_value(tf.convert_to_tensor(given))
        if np.shape(value) != (1, dim):
            return next_creator(**kwargs)
        variable = next_creator(**{**kwargs, "shape": tf.TensorShape([None, dim]), **_not_saved()})
        made.append((variable, float(value[0, 0])))
        return variable

    with tf.variable_creator_scope(create):
        yield


@contextlib.contextmanager
def _as_one_row(variable: tf.Variable) -> Iterator[None]:
    """Inside, the variable says that it has one row: optimizers make slots of the shape that it says."""
    shape = variable._shape
    variable._shape = tf.TensorShape([1, shape[1]])
    try:
        yield
    finally:
        variable._shape = shape


def _copy_of(stock: Any, weights: tf.Variable) -> tuple[Any, Callable[[tf.Tensor], Any]]:
    """A copy of a stock optimizer with slots of its own for `weights`, and what does one step of it."""
    if isinstance(stock, tf.compat.v1.train.Optimizer):
        return _copy_of_v1(stock, weights)
    config = {**stock.get_config(), "learning_rate": 0.0}
    if "jit_compile" in config:
        config["jit_compile"] = False
    optimizer = type(stock).from_config(config)
    if is_legacy(stock):
        return _copy_of_legacy(stock, optimizer, weights)
    # Not by setattr, which would track a variable that is the stock optimizer's.
    optimizer.__dict__["_learning_rate"] = stock._learning_rate
    optimizer.build([weights])
    optimizer.built = True

    def step(grads: tf.Tensor) -> None:
        # The rate may be another object by now: a schedule in place of a number.
        optimizer.__dict__["_learning_rate"] = stock._learning_rate
        if hasattr(optimizer, "_u_product_counter"):
            # By it Nadam of tf_keras knows that another variable had its turn in this step. It counts traces of a
            # function, so that the second one would take the first step for done; and here is one variable only.
            optimizer._u_product_counter = 0
        optimizer.apply_gradients([(grads, weights)])

    return optimizer, step


def _copy_of_legacy(stock: Any, optimizer: Any, weights: tf.Variable) -> tuple[Any, Callable[[tf.Tensor], Any]]:
    stock._create_hypers()
    optimizer._hyper["learning_rate"] = stock._hyper["learning_rate"]
    optimizer._create_all_weights([weights])

    def step(grads: tf.Tensor) -> Any:
        optimizer._hyper["learning_rate"] = stock._hyper["learning_rate"]
        return optimizer.apply_gradients([(grads, weights)])

    return optimizer, step


def _copy_of_v1(stock: Any, weights: tf.Variable) -> tuple[Any, Callable[[tf.Tensor], Any]]:
    # The learning rate stays the same object.
    optimizer = copy.copy(stock)
    optimizer._slots, optimizer._non_slot_dict, optimizer._deferred_slot_restorations = {}, {}, {}
    optimizer._create_slots([weights])
    return optimizer, lambda grads: optimizer.apply_gradients([(grads, weights)])
