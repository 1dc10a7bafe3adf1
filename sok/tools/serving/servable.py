"""One version of a model, in memory: loaded, warm, lent to requests, freed after the last of them."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format

from sok.base import _ops
from sok.saved_model.verifying import read_saved_model
from sok.tools.serving.refusal import words_of
from sok.tools.serving.versions import Found

logger = logging.getLogger("sok.serve")
SERVE = "serve"  # the tag of what is served, TensorFlow's


@dataclasses.dataclass(frozen=True)
class Signature:
    """What can be asked of a model, and the function that answers."""

    name: str
    inputs: dict[str, tf.TensorSpec]
    outputs: tuple[str, ...]
    call: Callable[..., Mapping[str, tf.Tensor]]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs for checked inputs.

        Raises:
            tf.errors.OpError: the model cannot answer them.
        """
        tensors = {name: tf.constant(value, self.inputs[name].dtype) for name, value in inputs.items()}
        return {name: output.numpy() for name, output in sorted(self.call(**tensors).items())}


class Servable:
    """A version that was loaded.

    Args:
        found: where it lies.
        freed: is called when it has left memory.

    Raises:
        OSError, ValueError, ImportError, tf.errors.OpError: it cannot be loaded.

    Safe from several threads.
    """

    def __init__(self, found: Found, freed: Callable[[Servable], None] | None = None) -> None:
        self.number, self.path, self.stamp = found.number, found.path, found.stamp
        self._freed = freed
        self._lock = threading.Lock()
        self._lent, self._retired = 0, False
        graphs = read_saved_model(found.path).meta_graphs
        graph = next((g for g in graphs if SERVE in g.meta_info_def.tags), graphs[0] if len(graphs) == 1 else None)
        if graph is None:
            raise ValueError(f"{found.path}: has no graph with the tag '{SERVE}'.")
        definitions = {n: d for n, d in sorted(graph.signature_def.items()) if not n.startswith("__")}
        if not definitions:
            raise ValueError(f"{found.path}: has no signature that could be served.")
        self.metadata = {name: _as_json(definition) for name, definition in definitions.items()}
        if any(asset.filename.endswith(".sok") for asset in graph.asset_file_def):
            _ops.serving_lib()  # registers the ops of a native export
        model = tf.saved_model.load(found.path, tags=list(graph.meta_info_def.tags))
        self.signatures = {name: _signature(name, one, model.signatures[name]) for name, one in definitions.items()}
        self._model: Any = model  # owns what the functions use
        self._warm()

    def _warm(self) -> None:
        """Has each signature answer once, so that no client waits for what TensorFlow does at the first call."""
        for signature in self.signatures.values():
            for rows in (1, 0):
                try:
                    signature.run({name: _zeros(spec, rows) for name, spec in signature.inputs.items()})
                    break
                except (tf.errors.OpError, ValueError, TypeError) as error:  # zeros may mean nothing to it
                    logger.debug("%s: signature '%s' of %d rows: %s", self.path, signature.name, rows, words_of(error))

    def lend(self) -> None:
        """Another request uses it; `give_back` when that has ended."""
        with self._lock:
            self._lent += 1

    def give_back(self) -> None:
        with self._lock:
            self._lent -= 1
            last = self._retired and self._lent == 0
        if last:
            self._free()

    def retire(self) -> None:
        """No more requests come: it is freed when the last of those that use it has ended."""
        with self._lock:
            if self._retired:
                return
            self._retired = True
            last = self._lent == 0
        if last:
            self._free()

    def _free(self) -> None:
        self.signatures, self._model = {}, None
        # What TensorFlow has loaded refers to itself in circles.
        threading.Thread(target=self._collect, name=f"free {self.path}", daemon=True).start()

    def _collect(self) -> None:
        gc.collect()
        if self._freed is not None:
            self._freed(self)


def _signature(name: str, definition: Any, call: Callable[..., Mapping[str, tf.Tensor]]) -> Signature:
    inputs = {
        key: tf.TensorSpec(tf.TensorShape(info.tensor_shape), tf.as_dtype(info.dtype), key)
        for key, info in sorted(definition.inputs.items())
    }
    return Signature(name, inputs, tuple(sorted(definition.outputs)), call)


def _as_json(definition: Any) -> dict[str, Any]:
    """A signature as TensorFlow Serving's metadata have it."""
    found: dict[str, Any] = json_format.MessageToDict(
        definition, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def _zeros(spec: tf.TensorSpec, rows: int) -> np.ndarray:
    shape = [] if spec.shape.rank is None else [rows if size is None else size for size in spec.shape]
    if spec.dtype == tf.string:
        return np.full(shape, b"", object)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)
