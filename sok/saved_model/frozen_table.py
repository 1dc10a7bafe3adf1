"""A table as stock variables: what stands for it in a SavedModel."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok.base import _ops
from sok.saved_model.initial_rows import initial_rows
from sok.table.initializers import InitializerSpec
from sok.table.own_initializer import KIND as OWN
from sok.table.table import EmbeddingVariable

ROW_DTYPES = {None: tf.float32, "float32": tf.float32, "float16": tf.float16, "int8": tf.int8}


def unseen_row(table: EmbeddingVariable, default: object) -> np.ndarray | None:
    """What keys without a row read as, where `default` of `export_saved_model` says so: [D].

    None if each reads as the row it would get.

    Raises:
        ValueError: neither 'initial', 'mean', 'zeros' nor a number.
    """
    spec, dim = table._initializer_spec, table.dim
    if default in ("initial", "mean") and spec.kind.startswith(OWN):
        raise ValueError(
            f"Table '{table.table_name}' has an initializer of your own, '{spec.kind.removeprefix(OWN)}', which "
            "an export cannot hold: say what unseen keys read as, `default='zeros'` or a number. Received: "
            f"{default!r}."
        )
    if default == "initial":
        return np.full(dim, spec.a, np.float32) if spec.kind == "constant" else None
    if default == "zeros":
        return np.zeros(dim, np.float32)
    if default == "mean":
        if spec.kind == "bank":
            return np.reshape(spec.bank, (-1, dim)).mean(0, dtype=np.float64).astype(np.float32)
        mean = (spec.a + spec.b) / 2 if spec.kind == "uniform" else spec.a
        return np.full(dim, mean, np.float32)
    if isinstance(default, (int, float, np.number)) and not isinstance(default, bool) and np.isfinite(default):
        return np.full(dim, default, np.float32)
    raise ValueError(f"`default` must be 'initial', 'mean', 'zeros' or a finite number. Received: {default!r}.")


@dataclasses.dataclass(frozen=True)
class About:
    """What stands for a table has it from there."""

    table: EmbeddingVariable
    unseen_row: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class _AboutFrozen(About):
    initial_rows: Callable[..., tf.Tensor]


class StandsForTable:
    """What all that stands for a table knows of it. It sets `_about`."""

    _about: About
    row_dtype: tf.DType

    def sorted_keys(self, words: np.ndarray) -> np.ndarray:
        """The bits of keys [n] in the order in which they are written."""
        raise NotImplementedError

    @property
    def table(self) -> EmbeddingVariable:
        return self._about.table

    @property
    def unseen_row(self) -> np.ndarray | None:
        """What all keys without a row read as [D]; None if that depends on the key."""
        return self._about.unseen_row

    def scope(self) -> Any:
        """Under which name its lookups appear in a graph."""
        return tf.name_scope(re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", f"table_{self.table.table_name}"))


class FrozenTable(StandsForTable, tf.Module):
    """Sorted keys and their rows, or of an identity table rows alone, in variables that stock ops read.

    The variables hold one row while a model is traced; `sok.saved_model.rows` writes the others beside it.

    Why not TensorFlow's hash tables: MutableDenseHashTable needs two keys that nobody uses, and here every key is
    legal; MutableHashTable and StaticHashTable put each key into a bucket of its own when a model is loaded, at several
    times the size of the keys; none of them has unsigned keys. Sorted keys are one tensor that is read as it lies in
    the file. A search takes longer where there are many ids: docs/export.md has figures.
    """

    _about: _AboutFrozen

    def __init__(
        self,
        table: EmbeddingVariable,
        row_dtype: tf.DType,
        unseen_row: np.ndarray | None,
        initial_rows: Callable[..., tf.Tensor] = initial_rows,
    ) -> None:
        super().__init__(name="frozen_table")
        # In a tuple of its own class: what a tf.Module can follow is saved with it.
        self._about = _AboutFrozen(table, unseen_row, initial_rows)
        dim, self.row_dtype = table.dim, row_dtype
        self.rows = _placeholder([dim], row_dtype, "rows")
        self.scales = _placeholder([], tf.float32, "scales") if row_dtype == tf.int8 else None
        self.keys = _placeholder([], word_dtype(table), "keys") if table.hashed else None

    @property
    def handles(self) -> list[tf.Tensor]:
        """What traced functions capture."""
        return [variable.handle for variable in self.variables]

    def sorted_keys(self, words: np.ndarray) -> np.ndarray:
        return np.sort(words)

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """The rows [..., D] float32 of `keys` [...]."""
        flat = tf.reshape(keys, [-1])
        with self.scope():
            rows = self._rows_at(tf.cast(flat, tf.int64)) if self.keys is None else self._of_hashed(self.keys, flat)
        shaped = tf.reshape(rows, tf.concat([tf.shape(keys), [self.table.dim]], 0))
        shaped.set_shape(keys.shape.concatenate([self.table.dim]))
        return shaped

    def _of_hashed(self, known: tf.Variable, keys: tf.Tensor) -> tf.Tensor:
        words = keys if keys.dtype == known.dtype else tf.bitcast(keys, known.dtype)
        known = known.read_value()
        place = tf.searchsorted(known, words, out_type=tf.int64)
        place = tf.minimum(place, tf.size(known, out_type=tf.int64) - 1)
        is_known = tf.equal(tf.gather(known, place), words)
        rows = self._rows_at(place)
        if self.unseen_row is not None:
            return tf.where(is_known[:, None], rows, self.unseen_row)
        return tf.cond(tf.reduce_all(is_known), lambda: rows, lambda: self._with_initial_rows(rows, is_known, keys))

    def _with_initial_rows(self, rows: tf.Tensor, is_known: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        unseen = tf.where(tf.logical_not(is_known))  # [n, 1]: few of many, and an initial row is some hundred ops
        return tf.tensor_scatter_nd_update(rows, unseen, self._initial_rows(tf.gather(keys, unseen[:, 0])))

    def _initial_rows(self, keys: tf.Tensor) -> tf.Tensor:
        # Signed keys are sign-extended, unsigned ones zero-extended: what a cast does.
        words = tf.bitcast(keys, tf.int64) if keys.dtype == tf.uint64 else tf.cast(keys, tf.int64)
        seed = tf.constant(self.table.seed, tf.int64)
        return self._about.initial_rows(self.table._initializer_spec, seed, words, self.table.dim)

    def _rows_at(self, place: tf.Tensor) -> tf.Tensor:
        rows = tf.cast(tf.gather(self.rows, place), tf.float32)
        return rows if self.scales is None else rows * tf.gather(self.scales, place)[:, None]


def word_dtype(table: EmbeddingVariable) -> tf.DType:
    """What the bits of keys are sorted as. Any order will do that the search agrees with."""
    return tf.int64 if table.key_dtype.size == 8 else tf.int32


class SharedInitialRows:
    """`initial_rows` as a function of the graph: tables of one initializer and dim share it, whatever their seeds."""

    def __init__(self) -> None:
        self._functions: dict[tuple[InitializerSpec, int], Any] = {}

    def __call__(self, spec: InitializerSpec, seed: tf.Tensor, words: tf.Tensor, dim: int) -> tf.Tensor:
        kind = (dataclasses.replace(spec, seed=None), dim)
        if kind not in self._functions:
            signature = [tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.int64)]
            with tf.init_scope():
                self._functions[kind] = tf.function(
                    lambda seed, words: initial_rows(spec, seed, words, dim), input_signature=signature, autograph=False
                )
        return self._functions[kind](seed, words)


def key_words(table: EmbeddingVariable) -> tf.Tensor:
    """The bits of the keys of this worker's shard [n], without a copy of the rows."""
    return tf.bitcast(_ops.lib().sok_table_keys(table.handle, key_dtype=table.key_dtype), word_dtype(table))


def _placeholder(shape: list[int], dtype: tf.DType, name: str) -> tf.Variable:
    """A variable of one row that may become any number of rows."""
    # Not tf.Variable(...), which a tf.function that is being traced would take for its own, and trace once more.
    with tf.device("/CPU:0"):
        return resource_variable_ops.ResourceVariable(
            tf.zeros([1, *shape], dtype), shape=tf.TensorShape([None, *shape]), trainable=False, name=name
        )
