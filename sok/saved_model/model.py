"""A Keras model, tf.Module or function as what is exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.base.types import Exportable
from sok.checkpoint.dense import named
from sok.lookup import lookup
from sok.saved_model.checkpoint import Variables, variables_in
from sok.saved_model.frozen_table import FrozenTable, key_words
from sok.saved_model.native_table import NativeFiles, NativeOps
from sok.saved_model.retracing import functions_are_traced_anew
from sok.saved_model.rows import Export, Freeze
from sok.saved_model.signatures import flat_function, served_by
from sok.saved_model.stock_ops import StockOps
from sok.saved_model.tracked import check_ops, resources_of
from sok.table.table import EmbeddingVariable


class ModelExport(Export):
    """Signatures of a model, traced."""

    is_eager = True

    def __init__(self, model: Exportable, signatures: Any, freeze: Freeze, files: NativeFiles | None) -> None:
        stock, self._files = (StockOps if files is None else NativeOps)(freeze), files
        self._functions = {}
        with _ops.substituted(stock), functions_are_traced_anew():
            for name, served in served_by(model, signatures).items():
                function, specs = flat_function(served)
                traced = tf.function(function, autograph=served.converts).get_concrete_function(**specs)
                self._functions[name] = traced
        for function in self._functions.values():
            check_ops(function.graph.as_graph_def())
        self.tables, self.names = stock.tables, tuple(self._functions)
        frozen = [handle for table in self.tables for handle in table.handles]
        self._saved = _Saved(self.tables, resources_of(list(self._functions.values()), model, frozen))
        self.dense_places = _dense_in(model, self._saved.resources)

    @staticmethod
    def takes(model: object) -> bool:
        return True  # or else what is wrong with it is told where it is read

    def save(self, folder: str) -> Variables | NativeFiles:
        namespaces = None if self._files is None else ["Sok"]
        options = tf.saved_model.SaveOptions(namespace_whitelist=namespaces, experimental_custom_gradients=False)
        tf.saved_model.save(self._saved, folder, signatures=self._functions, options=options)
        return variables_in(folder, self._checkpoint_name) if self._files is None else self._files.put_into(folder)

    def _checkpoint_name(self, frozen: FrozenTable, variable: str) -> str:
        return f"tables/{self.tables.index(frozen)}/{variable}/.ATTRIBUTES/VARIABLE_VALUE"

    def words(self, table: EmbeddingVariable) -> np.ndarray:
        return key_words(table).numpy()

    def rows(self, table: EmbeddingVariable, keys: np.ndarray) -> np.ndarray:
        return lookup.lookup_rows(table, keys, training=False, exact=True).numpy()


# Kinds of what can be exported; those that other rooms add come first.
_kinds: list[type[Export]] = [ModelExport]


def register(kind: type[Export]) -> None:
    _kinds.insert(0, kind)


def kind_of(model: object) -> type[Export]:
    _ops.lib()  # with which other rooms' kinds are loaded
    return next(kind for kind in _kinds if kind.takes(model))


def _dense_in(model: Any, resources: list[Any]) -> dict[str, str] | None:
    """Where the SavedModel's variables have the dense weights of `model`, by the names that saves give these.

    None: some have no name.
    """
    places = {
        id(one): f"resources/{number}/.ATTRIBUTES/VARIABLE_VALUE"
        for number, one in enumerate(resources)
        if isinstance(one, tf.Variable)
    }
    try:
        names = {id(variable): name for name, variable in named(True, model).items()} if places else {}
    except (TypeError, ValueError):  # nothing that could be walked through
        return None
    return {names[one]: place for one, place in places.items()} if places.keys() <= names.keys() else None


class _Saved(tf.Module):
    """Nothing of the model itself."""

    def __init__(self, tables: list[Any], resources: list[Any]) -> None:
        super().__init__(name="exported")
        self.tables, self.resources = list(tables), resources
