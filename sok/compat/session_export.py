"""A v1 graph and its session as what is exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import Exportable
from sok.compat.graph_copy import GraphCopy
from sok.lookup import lookup
from sok.saved_model.checkpoint import Variables, variables_in
from sok.saved_model.frozen_table import FrozenTable, key_words
from sok.saved_model.model import register
from sok.saved_model.native_table import NativeFiles, NativeOps
from sok.saved_model.rows import Export, Freeze
from sok.saved_model.signatures import all_parts, checked_name
from sok.saved_model.stock_ops import StockOps
from sok.saved_model.tracked import check_ops
from sok.table.table import EmbeddingVariable

v1 = tf.compat.v1


def session_of(model: object) -> Any | None:
    """The session that `model` is or, of a MonitoredSession, holds; None if it is none."""
    unwrapped = getattr(model, "_tf_sess", None)
    session = unwrapped() if callable(unwrapped) else model
    return session if isinstance(session, v1.Session) else None


class SessionExport(Export):
    """Part of the graph of a session, or MonitoredSession, in a graph of its own."""

    is_eager = False
    dense_places = None

    def __init__(self, model: Exportable, signatures: Any, freeze: Freeze, files: NativeFiles | None) -> None:
        session: Any = session_of(model)
        self._session, self._files = session, files
        self._readers: dict[EmbeddingVariable, tuple[tf.Tensor, tf.Tensor]] = {}
        named = _named(signatures)
        self._graph = tf.Graph()
        with self._graph.as_default():
            old = {id(t): t for inputs, _ in named.values() for t in inputs.values()}
            new = {key: v1.placeholder(t.dtype, t.shape, name=t.op.name) for key, t in old.items()}
            stock = (StockOps if files is None else NativeOps)(freeze)
            copy = GraphCopy(stock, [(old[key], new[key]) for key in old])
            self._signatures = {
                name: (
                    {part: new[id(t)] for part, t in inputs.items()},
                    {part: tf.identity(copy.tensor(t)) for part, t in outputs.items()},
                )
                for name, (inputs, outputs) in named.items()
            }
            initializers = v1.get_collection_ref(v1.GraphKeys.TABLE_INITIALIZERS)
            initializers += copy.initializers(session.graph.get_collection(v1.GraphKeys.TABLE_INITIALIZERS))
            if files is not None:
                initializers += [frozen.open() for frozen in stock.tables]
        check_ops(self._graph.as_graph_def())
        self.tables = stock.tables
        self.names = tuple(named)
        # Pairs, since variables are hashable in their own graph only: those of the copy, and of the session.
        self._variables = [(new, _variable_of(session.graph, op)) for op, new in copy.variables.items()]

    @staticmethod
    def takes(model: object) -> bool:
        return session_of(model) is not None

    def save(self, folder: str) -> Variables | NativeFiles:
        values = self._session.run([old for _, old in self._variables])
        with self._graph.as_default(), v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
            variables = [v for frozen in self.tables for v in frozen.variables]
            variables += [new for new, _ in self._variables]
            session.run([variable.initializer for variable in variables])
            for (variable, _), value in zip(self._variables, values, strict=True):
                session.run(variable.initializer, {variable.initializer.inputs[1]: value})
            builder = v1.saved_model.Builder(folder)
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.SERVING],
                signature_def_map={name: _signature(*of) for name, of in self._signatures.items()},
                assets_collection=[] if self._files is None else [frozen.asset.asset_path for frozen in self.tables],
                main_op=v1.tables_initializer(),
                saver=v1.train.Saver(variables, sharded=False, allow_empty=True),
                strip_default_attrs=True,
            )
            builder.save()
        return variables_in(folder, self._checkpoint_name) if self._files is None else self._files.put_into(folder)

    def _checkpoint_name(self, frozen: FrozenTable, variable: str) -> str:
        return getattr(frozen, variable).op.name

    def words(self, table: EmbeddingVariable) -> np.ndarray:
        with _unfinalized(self._session.graph):
            words = key_words(table)
        return self._session.run(words)

    def rows(self, table: EmbeddingVariable, keys: np.ndarray) -> np.ndarray:
        if table not in self._readers:
            with _unfinalized(self._session.graph):
                asked = v1.placeholder(table.key_dtype, [None])
                rows = lookup.lookup_rows(table, asked, training=False, exact=True)
                self._readers[table] = (asked, rows)
        asked, rows = self._readers[table]
        return self._session.run(rows, {asked: keys})


register(SessionExport)


def _named(signatures: Any) -> dict[str, tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]]:
    """Signatures with plain tensors by name."""
    is_right = isinstance(signatures, dict) and all(
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, dict) and part for part in value)
        for value in signatures.values()
    )
    if not is_right or not signatures:
        raise TypeError(
            "`signatures` of a session must be a dict from names to pairs of dicts, (inputs, outputs), of tensors of "
            f"its graph. Received: {signatures!r}."
        )
    return {
        checked_name(name): (all_parts(inputs.items()), all_parts(outputs.items()))
        for name, (inputs, outputs) in signatures.items()
    }


def _signature(inputs: dict[str, tf.Tensor], outputs: dict[str, tf.Tensor]) -> Any:
    return v1.saved_model.signature_def_utils.build_signature_def(
        {name: v1.saved_model.build_tensor_info(tensor) for name, tensor in inputs.items()},
        {name: v1.saved_model.build_tensor_info(tensor) for name, tensor in outputs.items()},
        v1.saved_model.signature_constants.PREDICT_METHOD_NAME,
    )


def _variable_of(graph: tf.Graph, op: tf.Operation) -> tf.Variable:
    keys = v1.GraphKeys
    known = [*graph.get_collection(keys.GLOBAL_VARIABLES), *graph.get_collection(keys.LOCAL_VARIABLES)]
    for variable in known:
        if getattr(variable, "op", None) is op or getattr(getattr(variable, "handle", None), "op", None) is op:
            return variable
    raise ValueError(f"The variable '{op.name}' is in none of the graph's collections of variables: nothing reads it.")


@contextlib.contextmanager
def _unfinalized(graph: tf.Graph) -> Iterator[None]:
    """Inside, ops can be added to a graph, which is the default one, though a MonitoredSession has closed it."""
    is_finalized = graph.finalized
    if is_finalized:
        graph._unsafe_unfinalize()
    try:
        with graph.as_default():
            yield
    finally:
        if is_finalized:
            graph.finalize()
