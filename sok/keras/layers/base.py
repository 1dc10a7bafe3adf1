"""What the embedding layers share, as a mixin for Keras 3 and tf_keras: the table, Keras' hooks, configuration."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from sok.base import keras_calls, strategies
from sok.base.errors import refuse_strings
from sok.base.types import DTypeLike, Ids, Shape
from sok.checkpoint import store_files
from sok.job import context
from sok.lookup import exchange
from sok.lookup.shared_slots import SharedSlots
from sok.table.initializers import Initializer, resolve
from sok.table.keys import as_keys
from sok.table.options import TableOptions, said_once, whole_number
from sok.table.placement import Placement
from sok.table.table import EmbeddingVariable

# Two threads may call a layer, or two layers, for the first time. One lock for all: layers are copied and pickled.
_making_tables = threading.RLock()


_SIZES = ("max_vocabulary_size_per_gpu", "embedding_vec_size", "slot_num")

# In configurations from before layers had `table`: the name of a property there and here.
_OLD = {name: name for name in ("key_dtype", "exchange_dtype", "placement")}
_OLD |= {"use_hashtable": "hashed", "embedding_initializer": "initializer"}


if TYPE_CHECKING:

    class _Layer:
        """What the mixin needs of the Keras layer that follows it among the bases."""

        name: str
        trainable: bool
        compute_dtype: str | None

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
        def get_config(self) -> dict[str, Any]: ...
        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any: ...
else:
    _Layer = object


class TableLayerMixin(_Layer):
    """A layer over a table. Stands before a class of Keras among a layer's bases."""

    # Of the Keras that the class is made for: see sok.layers.for_keras.
    _keras_initializers: Any = None
    _options: TableOptions
    _table: EmbeddingVariable | None

    def _hold(self, options: TableOptions) -> None:
        """After the constructor of Keras: what the layer needs to be one over a table."""
        # XLA has no kernels of ours. Keras 3 heeds this flag only if it was set before the first compile().
        self.supports_jit = False
        # Weights of ids stay float32: only the output has the compute dtype. (Keras 3's and tf_keras' name for it.)
        self.autocast = self._autocast = False
        self._options = dataclasses.replace(options, trainable=True)  # the layer's own, and may change
        self._table = None

    @property
    def embedding_variable(self) -> EmbeddingVariable:
        """The layer's table, which is made now if no input has made it."""
        if self._table is None:
            with _making_tables:
                if self._table is None:
                    self._table = self._make_table()
        return self._table

    def _table_size(self) -> tuple[int, int]:
        """Length of a row, and rows that this worker may hold."""
        raise NotImplementedError

    def _make_table(self) -> EmbeddingVariable:
        options = dataclasses.replace(self._options, trainable=self.trainable)
        table = EmbeddingVariable(*self._table_size(), name=self.name, options=options)
        # Keras 3 does not find variables that are not its own; tf_keras finds the attribute by itself.
        if hasattr(self, "_track_variable"):
            self._track_variable(table)
        return table

    @property
    def var(self) -> EmbeddingVariable:
        """SOK's other name for `embedding_variable`."""
        return self.embedding_variable

    def build(self, input_shape: Shape | None = None) -> None:
        self.embedding_variable  # noqa: B018 (made here)
        self.built = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Keras takes a list for several inputs, and lets NumPy's int64 meet a table of int32 keys.
        given = args[0] if args else kwargs.get("inputs")
        # Keras' symbols are looked up by nobody; and one worker needs no table before it is built.
        asks_peers = context.size() > 1 and not any(_is_symbol(part) for part in tf.nest.flatten(given))
        with exchange.told_to_peers(*(self._tables_asked() if asks_peers else [])):
            if isinstance(given, (list, tuple, np.ndarray)) and not _holds_tensors(given):
                keys = self._from_values(given)
                args, kwargs = ((keys, *args[1:]), kwargs) if args else (args, {**kwargs, "inputs": keys})
            else:
                self._check_ids(given)
                if type(given).__name__.endswith("KerasTensor"):  # else the first step of fit would say so
                    self._check_symbol(given)
            if not self.built and isinstance(given, tf.SparseTensor) and given.shape.rank is None:
                self.build(None)  # Keras 3 would ask for the shape first
            return super().__call__(*args, **kwargs)

    def _tables_asked(self) -> list[EmbeddingVariable]:
        return [self.embedding_variable]

    def _from_values(self, given: Any) -> tf.Tensor:
        """Ids that were given as a list or an array."""
        return as_keys(given, tf.as_dtype(self._options.key_dtype), self.name)

    def _check_ids(self, given: Any) -> None:
        """`ValueError` for inputs that cannot be ids, by their dtype."""
        check_integers(given, self.name)

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        store_files.save(self.embedding_variable, store)

    def load_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        store_files.load(self.embedding_variable, store)

    def _check_symbol(self, symbol: Any) -> None:
        """`ValueError` if no batch of a symbolic input of Keras can be looked up, as far as its shape is known."""
        raise NotImplementedError

    @staticmethod
    def _inserts(training: Any) -> Any:
        # Outside fit, evaluate and predict Keras says nothing: a bare call in a custom loop trains, as in SOK.
        # Keras 3 says nothing either to the layers of a model whose own call takes no `training`.
        if training is None:
            return not keras_calls.is_evaluating()
        return tf.cast(training, tf.bool) if tf.is_tensor(training) else bool(training)

    def _to_compute_dtype(self, rows: Any) -> Any:
        # With v2 behaviour off, tf_keras takes the dtype of the first input, integers here, for the layer's own.
        dtype = tf.as_dtype(self.compute_dtype or tf.float32)
        return tf.cast(rows, dtype) if dtype.is_floating else rows


class EmbeddingLayerMixin(TableLayerMixin):
    """What the layers of SOK v1 share: features of a fixed number, by SOK's names of sizes."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        use_hashtable: bool,
        key_dtype: DTypeLike | None,
        embedding_initializer: Initializer | None,
        exchange_dtype: DTypeLike | None = None,
        placement: Placement | None = None,
        table: TableOptions | None = None,
        distinct_slots: bool | None = None,
        **kwargs: Any,
    ) -> None:
        strategies.refuse(f"A sok.{type(self).__name__}", self, may_be_shared=True)
        resolve(embedding_initializer, "embedding_initializer")
        options = said_once(
            table,
            key_dtype=key_dtype,
            initializer=embedding_initializer,
            hashed=None if use_hashtable else False,
            exchange_dtype=exchange_dtype,
            placement=placement,
        )
        check_trainable(options, kwargs)
        super().__init__(**kwargs)
        checked = (whole_number(name, size) for name, size in zip(_SIZES, sizes, strict=True))
        self.max_vocabulary_size_per_gpu, self.embedding_vec_size, self.slot_num = checked
        self._hold(options)
        if distinct_slots and not options.hashed:
            raise ValueError(
                "`distinct_slots` must be False with use_hashtable=False, where ids are row numbers: give each slot a "
                "range of row numbers with sok.data.add_offsets, or take a hashed table."
            )
        self.distinct_slots = None if distinct_slots is None else bool(distinct_slots)
        self._shared_slots = SharedSlots(self.name, self.slot_num)

    def _table_size(self) -> tuple[int, int]:
        return self.embedding_vec_size, self.max_vocabulary_size_per_gpu

    def get_config(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in _SIZES}
        sizes["distinct_slots"] = self.distinct_slots
        return {**super().get_config(), **sizes, "table": self._options.get_config(self._keras_initializers)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        config = dict(config)
        old = {_OLD[name]: config.pop(name) for name in _OLD if name in config}
        config["table"] = TableOptions.from_config(config.get("table", old), cls._keras_initializers)
        return super().from_config(config)

    def _hints_at_shared_slots(self) -> bool:
        return self.distinct_slots is None and self.slot_num > 1


def check_trainable(options: TableOptions, kwargs: dict[str, Any]) -> None:
    """A table that is not trainable makes its layer so, of whose constructor these are the arguments."""
    if not options.trainable and kwargs.setdefault("trainable", False):
        raise ValueError("`trainable` is given twice: True, and False in `table`.")


def check_integers(inputs: Ids, layer: str) -> None:
    if not (isinstance(inputs, (int, float, str, list, tuple, dict)) or hasattr(inputs, "dtype")):
        raise ValueError(f"`inputs` must be a tensor of integers, or what makes one. Received: {inputs!r}.")
    dtype = getattr(inputs, "dtype", None)
    refuse_strings(dtype, f"`inputs` of layer '{layer}'")
    name = getattr(dtype, "name", dtype)  # Keras 3's symbolic tensors have names for dtypes
    if isinstance(name, str) and not name.startswith(("int", "uint")):
        raise ValueError(
            f"`inputs` must be integers. Received: {name}. Keras makes inputs float32 unless told otherwise, also that "
            "of a Sequential model which does not begin with one: use keras.Input(shape, dtype='int64')."
        )


def _is_symbol(part: Any) -> bool:
    return not tf.is_tensor(part) and (hasattr(part, "_keras_history") or type(part).__name__ == "KerasTensor")


def _holds_tensors(inputs: Any) -> bool:
    return any(hasattr(x, "dtype") and not isinstance(x, (np.ndarray, np.generic)) for x in tf.nest.flatten(inputs))
