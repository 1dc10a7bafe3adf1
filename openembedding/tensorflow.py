"""OpenEmbedding's names for TensorFlow, over `sok`. Signatures are its own; what differs is in docs/migrating.md."""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import tensorflow as tf

import sok
from openembedding import flags
from sok.checkpoint import store_files
from sok.job import context
from sok.keras import conversion

__all__ = [
    *("Adadelta", "Adagrad", "Adam", "Adamax", "Embedding", "Ftrl", "Model", "Nadam", "RMSprop", "SGD"),
    *("distributed_model", "distributed_optimizer", "exb", "flags", "load_server_model", "save_as_original_model"),
    "save_server_model",
]

_INSIDE = "openembedding"  # the folder of rows in that of a model


def _begin() -> None:
    flags.check()
    try:
        context.get_transport()
    except RuntimeError:  # one of several workers, whose script knows no sok.Init
        sok.Init()


class Embedding(sok.Embedding):
    """`sok.Embedding` with OpenEmbedding's arguments.

    Args:
        input_dim: None or -1: any 64-bit id. n: ids are row numbers in [0, n).
        sparse_as_dense: True: an ordinary variable on each worker, averaged with the dense ones.
        num_shards: taken; a table is spread over all workers.
        explicit: taken. `embeddings_regularizer` and `embeddings_constraint` act on the rows of a batch either way.
        **kwargs: those of Keras' own layer and of `sok.Embedding`.

    Raises:
        As `sok.Embedding`.

    Example:
        >>> layer = Embedding(1000, 4, num_shards=2)
        >>> layer(tf.constant([1, 2])).shape
        TensorShape([2, 4])
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        activity_regularizer: Any = None,
        embeddings_constraint: Any = None,
        *args: Any,
        num_shards: int | None = None,
        sparse_as_dense: bool = False,
        explicit: bool = True,
        **kwargs: Any,
    ) -> None:
        _begin()
        any_id = input_dim is None or input_dim == -1 or input_dim >= 2**63
        dense_size = 0 if any_id or not sparse_as_dense else input_dim
        terms = {
            "embeddings_regularizer": embeddings_regularizer,
            "activity_regularizer": activity_regularizer,
            "embeddings_constraint": embeddings_constraint,
        }
        kwargs.update({name: term for name, term in terms.items() if term is not None})
        kwargs.setdefault("sparse_as_dense_size", dense_size)
        super().__init__(None if any_id else input_dim, output_dim, embeddings_initializer, *args, **kwargs)


def distributed_optimizer(optimizer: Any, explicit: bool = True) -> Any:
    """`sok.DistributedOptimizer(optimizer)`, of which tables have the lazy form. `explicit` is taken.

    Rows outside the batch stay as they are; Adam and Adamax correct the bias of a row by the steps that it has had.

    `hvd.DistributedOptimizer` around it gives the same optimizer with Horovod's `op`, for dense weights and rows alike.

    Example:
        >>> distributed_optimizer(tf.keras.optimizers.Adam()).op
        'average'
    """
    _begin()
    return sok.DistributedOptimizer(optimizer, "lazy")


def distributed_model(
    model: Any,
    sparse_as_dense_size: int = 64,
    num_shards: int | None = None,
    override_method: bool = True,
    explicit: bool = False,
) -> Any:
    """`sok.distributed_model`, which changes the model itself, subclassed ones too, and keeps its weights.

    Args:
        sparse_as_dense_size: layers of up to so many rows, inclusive, stay ordinary variables.
        num_shards, explicit: taken.
        override_method: whether `save`, `save_weights` and `load_weights` write and read rows, too, and there is a
            `save_as_original_model`. All of them are collective: all workers call them.

    Example:
        >>> ids = tf.keras.Input([2], dtype="int64")
        >>> model = tf.keras.Model(ids, tf.keras.layers.Embedding(100, 3)(ids))
        >>> model = distributed_model(model)
        >>> isinstance(model.layers[1], sok.Embedding), hasattr(model, "save_as_original_model")
        (True, True)
    """
    _begin()
    model = sok.distributed_model(model, sparse_as_dense_size=sparse_as_dense_size)
    if override_method:
        conversion._set_class(model, conversion._named_as(type(model), _Saves, {}))
    return model


def save_server_model(model: Any, path: str, include_optimizer: bool = True) -> None:
    """Writes the rows of a model's tables, and with `include_optimizer` what optimizers keep of them. Collective."""
    sok.save(path, model, _optimizer_of(model) if include_optimizer else None)


def load_server_model(model: Any, path: str) -> None:
    """Gives a model's tables the rows that `save_server_model` has written, on any number of workers. Collective.

    What optimizers keep of rows is not read: `sok.restore` does that.
    """
    sok.restore(path, model, slots=False)


def save_as_original_model(
    model: Any, path: str, overwrite: bool = True, include_optimizer: bool = True, **kwargs: Any
) -> None:
    """Writes a SavedModel of stock ops, also of tables of any id: `sok.export_saved_model`. Collective.

    Raises:
        ValueError: `include_optimizer` is not False: a SavedModel for serving has no optimizer.
    """
    if include_optimizer:
        raise ValueError("`include_optimizer` must be False: what is served has no optimizer. Received: True.")
    sok.export_saved_model(model, path, overwrite=overwrite)


def _optimizer_of(model: Any) -> Any:
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "embedding_optimizer", None)


def _weights_file(path: Any) -> str:
    text = os.fspath(path)
    return text if text.endswith(".weights.h5") else f"{text}.weights.h5"


class _Saves:
    """Stands before the class of a model whose files are to have the rows, too."""

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if store_files.leaves_rows_out():  # sok.save_weights, of the dense ones
            super().save_weights(filepath, *args, **kwargs)  # type: ignore[misc]
            return
        path = _weights_file(filepath)
        if sok.rank() == 0:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        sok.save_weights(self, path)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if store_files.leaves_rows_out():
            super().load_weights(filepath, *args, **kwargs)  # type: ignore[misc]
            return
        path = _weights_file(filepath)
        inside = os.path.join(os.path.dirname(os.fspath(filepath)), os.pardir, _INSIDE, "model.weights.h5")
        found = next((one for one in (path, inside) if os.path.exists(one)), None)
        if found is None:
            raise OSError(f"There are no weights in {path!r}, nor in {os.path.normpath(inside)!r}.")
        sok.load_weights(self, found)

    def save(self, filepath: Any, overwrite: bool = True, include_optimizer: bool = True, **kwargs: Any) -> None:
        path = os.fspath(filepath)
        sok.export_saved_model(self, path, overwrite=overwrite)
        self.save_weights(os.path.join(path, _INSIDE, "model.weights.h5"))
        if include_optimizer:
            save_server_model(self, os.path.join(path, _INSIDE, "rows"))

    def save_as_original_model(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        save_as_original_model(self, os.fspath(filepath), overwrite, **kwargs)


class Model(_Saves, tf.keras.Model):
    """`tf.keras.Model`, to be subclassed, with `save`, `save_weights` and `load_weights` that keep rows, too."""


def _distributed(name: str) -> Any:
    made = getattr(tf.keras.optimizers, name)

    @functools.wraps(made, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        return distributed_optimizer(made(*args, **kwargs))

    make.__doc__ = f"`distributed_optimizer(tf.keras.optimizers.{name}(...))`."
    return make


Adadelta, Adagrad, Adam, Adamax = map(_distributed, ("Adadelta", "Adagrad", "Adam", "Adamax"))
Ftrl, Nadam, RMSprop, SGD = map(_distributed, ("Ftrl", "Nadam", "RMSprop", "SGD"))

exb = types.SimpleNamespace(
    save_server_model=save_server_model,
    load_server_model=load_server_model,
    save_as_original_model=save_as_original_model,
    distributed_model=distributed_model,
    distributed_optimizer=distributed_optimizer,
)
