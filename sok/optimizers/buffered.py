"""Stock optimizers that have no equal in `sok.optimizers`, run by themselves on the rows that a step has touched.

The distinct rows of a batch are put into a dense variable, their slots into others, a copy of the stock optimizer does
its step on these, and what came of it goes back. Rows outside the batch are left alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok import _ops
from sok.optimizers import gradients
from sok.optimizers.matching import _class_of, _NoMatch, _refuse
from sok.transport.base import run_now

# Optimizers that treat each element by itself and look at nothing but its gradient and slots: weights may start at 0,
# and what they become is what has to be added.
_KERAS = ("SGD", "RMSprop", "Adadelta", "Adamax", "Nadam", "Adam", "Lion")
_LEGACY = ("SGD", "RMSprop", "Adadelta", "Adamax", "Nadam", "Adam")
_V1 = ("MomentumOptimizer", "RMSPropOptimizer", "AdadeltaOptimizer")
# These look at the weights too.
_READ_WEIGHTS = ("Ftrl", "FtrlOptimizer")


class Buffered:
    """Trains tables by copies of a stock optimizer; what `OptimizerWrapper` needs of a `sok.optimizers.Optimizer`.

    Each table has a copy, which counts the steps of that table. Copies use the learning rate of the stock optimizer
    itself.

    Args:
        stock: one of those that `check` accepts.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._of_tables: weakref.WeakKeyDictionary[Any, _Rows] = weakref.WeakKeyDictionary()
        with tf.init_scope(), tf.device("CPU:0"):
            self._iterations = tf.compat.v1.Variable(
                0, dtype=tf.int64, trainable=False, use_resource=True, name="buffered/iterations"
            )

    @property
    def iterations(self) -> tf.Variable:
        """Steps so far: int64 []."""
        return self._iterations

    @property
    def stock(self) -> Any:
        """The stock optimizer."""
        return self._stock

    def has_slots(self, table: Any) -> bool:
        """Whether this worker has slots of `table`."""
        return table in self._of_tables

    def slots_of(self, table: Any) -> _Rows:
        """The slots of `table`, made when first asked for."""
        if table not in self._of_tables:
            with tf.init_scope(), tf.device("CPU:0"):
                self._of_tables[table] = _Rows(table, self._stock)
        return self._of_tables[table]

    def _apply(self, pairs: list[tuple[Any, Any]], name: str | None = None) -> tf.Operation | None:
        updates = []
        with tf.name_scope(name or "Buffered"):
            for grad, table in pairs:
                updates.append(self.slots_of(table).update(gradients.from_slices(grad, table)))
            with tf.control_dependencies([op for op in updates if op is not None]):
                counted = self._iterations.assign_add(1)
        if tf.compat.v1.executing_eagerly_outside_functions():
            return None
        return tf.convert_to_tensor(counted).op


def check(stock: Any) -> None:
    """Raises `_NoMatch`, with a sentence, if `Buffered` cannot do what `stock` does."""
    for library, path, names in (
        ("keras", "optimizers", _KERAS),
        ("tf_keras", "optimizers", _KERAS),
        ("tf_keras", "optimizers.legacy", _LEGACY),
        ("tensorflow", "compat.v1.train", _V1),
    ):
        if any(type(stock) is _class_of(library, f"{path}.{name}") for name in (*names, *_READ_WEIGHTS)):
            # What is measured over a whole gradient, or moves what is not in the batch.
            _refuse(stock, "clipnorm", "global_clipnorm", "weight_decay", "use_ema", "gradient_accumulation_steps")
            _refuse(stock, "gradient_transformers")
            return
    raise _NoMatch(
        "known are exactly SGD, Adagrad, Adam, RMSprop, Adadelta, Adamax, Nadam and Ftrl of Keras 3, tf_keras and "
        "tf_keras.optimizers.legacy (of the first two also Lion), and GradientDescentOptimizer, MomentumOptimizer, "
        "AdagradOptimizer, AdamOptimizer, RMSPropOptimizer, AdadeltaOptimizer and FtrlOptimizer of tf.compat.v1.train."
    )


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One slot of the rows of a batch, and of all rows."""

    buffer: tf.Variable  # [U, D]
    kept: Any  # EmbeddingVariable of this worker alone: row number -> [D]


class _Rows:
    """The rows of one table that a step has touched, as a dense variable with an optimizer of its own."""

    def __init__(self, table: Any, stock: Any) -> None:
        # Weakly: `Buffered` knows these rows by their table, and lets go of them with it.
        self._table = weakref.ref(table)
        self._reads_weights = type(stock).__name__ in _READ_WEIGHTS
        if self._reads_weights and table.hashed:
            raise ValueError(
                f"sok.OptimizerWrapper cannot do to table '{table.table_name}' what {type(stock).__name__} does: that "
                "needs the weights of the rows, which a gradient leads to in tables without hashing only "
                "(sok.Variable, use_hashtable=False). Train it by one of sok.optimizers instead."
            )
        made: list[tuple[tf.Variable, float]] = []
        self._weights = tf.Variable(
            tf.zeros([1, table.dim]), trainable=False, shape=[None, table.dim], name="sok_rows", **_not_saved()
        )
        with _slots_of_any_size(table.dim, made), _as_one_row(self._weights):
            self._copy, self._step = _copy_of(stock, self._weights)
        self._slots = [_Slot(buffer, _keep(table, number, start)) for number, (buffer, start) in enumerate(made)]

    @property
    def num_slots(self) -> int:
        """How many numbers are kept for each weight."""
        return len(self._slots)

    def row_numbers(self, keys: tf.Tensor) -> tf.Tensor:
        """Under what slots are kept of keys that this worker holds, [n] int64; of a key without a row -1."""
        if not self._table().hashed:
            return _numbers_without_hashing(self._table(), keys)
        _, row_ids = _ops.lib().sok_table_lookup(self._table().handle, keys, False, dim=self._table().dim)
        return tf.where(row_ids < 0, row_ids, _row_number(row_ids))

    def read(self, numbers: tf.Tensor) -> list[tf.Tensor]:
        """Each slot [n, D] of rows; where no step has been, what it starts as."""
        return [
            _ops.lib().sok_table_lookup(slot.kept.handle, numbers, False, dim=slot.kept.dim)[0] for slot in self._slots
        ]

    def store(self, numbers: tf.Tensor, slots: Sequence[tf.Tensor]) -> None:
        """Sets each slot [n, D] of rows."""
        for slot, values in zip(self._slots, slots, strict=True):
            slot.kept.assign(numbers, values)

    def update(self, g: gradients.TableGradient) -> tf.Operation | None:
        lib = _ops.lib()
        row_ids, grads = lib.sok_sum_duplicates(g.row_ids, g.values)
        # Negative: of lookups without training, which made no row.
        row_ids, grads = tf.boolean_mask(row_ids, row_ids >= 0), tf.boolean_mask(grads, row_ids >= 0)
        numbers = _row_number(row_ids)
        start = self._read(g.variable, numbers) if self._reads_weights else tf.zeros_like(grads)
        filled = [self._weights.assign(start, read_value=False)]
        for slot in self._slots:
            rows, _ = lib.sok_table_lookup(slot.kept.handle, numbers, True, dim=slot.kept.dim)
            filled.append(slot.buffer.assign(rows, read_value=False))
        with tf.control_dependencies(_ops_of(filled)):
            stepped = self._step(tf.identity(grads))
        with tf.control_dependencies(_ops_of([stepped])):
            changed = dataclasses.replace(g, row_ids=row_ids, values=start - self._weights.read_value(), distinct=True)
            done = [gradients.apply([changed], 1, [1.0], "sgd", "buffered", "allow")]
            done += [slot.kept.assign(numbers, slot.buffer.read_value()) for slot in self._slots]
        return None if tf.compat.v1.executing_eagerly_outside_functions() else tf.group(*_ops_of(done))

    @staticmethod
    def _read(table: Any, numbers: tf.Tensor) -> tf.Tensor:
        keys = numbers if table.owner is not None else numbers * table.world_size + table.rank
        rows, _ = _ops.lib().sok_table_lookup(table.handle, tf.cast(keys, table.key_dtype), False, dim=table.dim)
        return rows


def _row_number(row_ids: tf.Tensor) -> tf.Tensor:
    # The upper half of a row id changes whenever rows are erased.
    return tf.bitwise.bitwise_and(row_ids, tf.constant(2**32 - 1, tf.int64))


def _numbers_without_hashing(table: Any, keys: tf.Tensor) -> tf.Tensor:
    return tf.cast(keys, tf.int64) // (table.world_size if table.owner is None else 1)


def _ops_of(results: list[Any]) -> list[Any]:
    """What to wait for, of operations' results in a graph; eagerly nothing."""
    return [result for result in results if isinstance(result, (tf.Operation, tf.Tensor))]


def _not_saved() -> dict[str, Any]:
    """For a variable of a v1 graph that is written before it is read, always: neither initialised nor saved."""
    return {} if tf.executing_eagerly() else {"collections": []}


def _keep(table: Any, number: int, start: float) -> Any:
    from sok.table import EmbeddingVariable

    return EmbeddingVariable(
        table.dim,
        2**32 - 2,
        name=f"{table.table_name}_slot{number}",
        initializer=tf.compat.v1.constant_initializer(start),
        trainable=False,
        owner=None if table.world_size == 1 else table.rank,
    )


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
    if hasattr(stock, "_create_hypers"):
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
