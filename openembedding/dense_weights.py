"""Weights of stock layers as Keras 2 has saved them beside the rows of OpenEmbedding's servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from sok.base.types import KerasModel
from sok.table.table import is_embedding_variable

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def read_for(model: KerasModel, path: str) -> list[tuple[Any, np.ndarray]]:
    """Each weight of a model that is no table, and its value from the file, by its name: 'dense/kernel'.

    Args:
        path: what `save_weights` was given: of a TensorFlow checkpoint ('NAME' of 'NAME.index'), or of an HDF5 file.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: a weight is not there, or has another shape.
    """
    read = _in_checkpoint(path) if tf.io.gfile.exists(f"{path}.index") else _in_hdf5(path)
    found = []
    for variable in model.weights:
        if is_embedding_variable(variable):
            continue
        name = _name_of(variable)
        if name not in read:
            raise ValueError(
                f"{path} has no weight '{name}'. It has: {', '.join(sorted(read))}. Layers must have the names that "
                "they had there. openembedding.tensorflow.load_server_model takes over rows alone."
            )
        value = read[name]()
        if tuple(value.shape) != tuple(variable.shape):
            raise ValueError(f"{path}: '{name}' is {list(value.shape)} there, and {list(variable.shape)} here.")
        found.append((variable, value))
    return found


def _name_of(variable: Any) -> str:
    return (getattr(variable, "path", None) or variable.name).removesuffix(":0")


def _in_checkpoint(path: str) -> dict[str, Callable[[], np.ndarray]]:
    """What reads each variable, by the name that it had."""
    reader = tf.train.load_checkpoint(path)
    if not reader.has_tensor(_GRAPH):
        names = {key: key for key in reader.get_variable_to_shape_map()}
    else:
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(_GRAPH))
        attributes = [attribute for node in graph.nodes for attribute in node.attributes]
        names = {one.full_name: one.checkpoint_key for one in attributes if one.full_name}
    return {name: lambda key=key: np.asarray(reader.get_tensor(key)) for name, key in names.items()}  # type: ignore[misc]


def _in_hdf5(path: str) -> dict[str, Callable[[], np.ndarray]]:
    import h5py

    if not tf.io.gfile.exists(path) or not h5py.is_hdf5(path):
        raise FileNotFoundError(
            f"{path}: there is neither {path}.index, of a TensorFlow checkpoint, nor an HDF5 file of this name. "
            "openembedding.tensorflow.load_server_model takes over rows alone."
        )
    found: dict[str, Callable[[], np.ndarray]] = {}
    with h5py.File(path, "r") as file:
        top = file.get("model_weights", file)
        for layer in top.values():
            for name in layer.attrs.get("weight_names", ()):
                text = name.decode() if isinstance(name, bytes) else name
                value = np.asarray(layer[text])
                found[text.removesuffix(":0")] = lambda value=value: value  # type: ignore[misc]
    return found
