"""OpenEmbedding's names for TensorFlow, over `sok`. Signatures are its own; what differs is in docs/migrating.md."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import types
import warnings
from typing import Any

import tensorflow as tf

import sok
from openembedding import dense_weights, flags, persisting, refused, servers
from sok.base import keras_calls
from sok.base.patching import Here
from sok.base.types import KerasInitializer, KerasModel, PathLike, StockOptimizer
from sok.checkpoint import store_files
from sok.compat.formats import openembedding as its_files
from sok.distributed import joining, tables
from sok.job import agreement, context, meeting
from sok.keras import conversion

__all__ = [
    *("Adadelta", "Adagrad", "Adam", "Adamax", "Embedding", "Ftrl", "Model", "Nadam", "RMSprop", "SGD"),
    *("distributed_model", "distributed_optimizer", "exb", "flags", "load_server_model", "save_as_original_model"),
    *("Variable", "persist_server_model", "pulling", "restore_server_model", "save_server_model"),
    "should_persist_server_model",
]

_INSIDE = "openembedding"  # the folder of rows in that of a model
_META = "openembedding.json"  # beside rows: whether optimizers are to take up theirs


def _begin() -> None:
    try:
        context.get_transport()
    except RuntimeError:  # one of several workers, whose script knows no sok.Init
        sok.Init()
    if flags.name_servers:
        servers.connect(flags.master_endpoint, flags.wait_num_servers)
    flags.num_workers = context.size()


_inside = Here()  # what all workers do at the same time
_models: list[Any] = []  # on several workers, those that one worker may ask all to save


def _register(model: Any) -> None:
    if context.size() > 1 and not any(one is model for one in _models):
        for name, do in _BY_ALL.items():
            meeting.serve(f"openembedding.{name}", functools.partial(_serve, do))
        _models.append(model)


def _serve(do: Any, number: int, *arguments: Any) -> None:
    with _inside.inside(True):
        do(_models[number], *arguments)


def _by_all(name: str, model: Any, *arguments: Any) -> None:
    """Has all workers do this to their own model, whether they call it or not."""
    number = next((number for number, one in enumerate(_models) if one is model), None)
    if number is None or _inside.value:
        with _inside.inside(True):
            _BY_ALL[name](model, *arguments)
    else:
        meeting.ask(f"openembedding.{name}", number, *arguments)


_LAST = ("mask_zero", "input_length")  # of Keras 2's own arguments, after those that OpenEmbedding names


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
        embeddings_initializer: KerasInitializer = "uniform",
        embeddings_regularizer: object = None,
        activity_regularizer: object = None,
        embeddings_constraint: object = None,
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
        if len(args) > len(_LAST):
            most, given = 6 + len(_LAST), 6 + len(args)
            raise TypeError(f"Embedding takes at most {most} arguments without a name. Received: {given}.")
        kwargs.update(zip(_LAST, args, strict=False))
        kwargs.setdefault("sparse_as_dense_size", dense_size)
        kwargs.setdefault("table", persisting.table_options())
        super().__init__(None if any_id else input_dim, output_dim, embeddings_initializer, **kwargs)


_told: list[str] = []  # ops that were named


def _tell_op(op: str) -> None:
    if op == sok.Average and context.size() > 1 and not _told:
        _told.append(op)
        warnings.warn(
            "hvd.DistributedOptimizer averages unless it is told op=hvd.Sum, and here rows follow it as dense weights "
            "do. OpenEmbedding itself sums the gradients of rows whatever the op: with op=hvd.Sum both are sums.",
            stacklevel=2,
        )


tables.tell_op_of_horovod = _tell_op


def distributed_optimizer(optimizer: StockOptimizer, explicit: bool = True) -> Any:
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
    model: KerasModel,
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
            `save_as_original_model`. One worker may call them alone: see `save_server_model`.

    Example:
        >>> ids = tf.keras.Input([2], dtype="int64")
        >>> model = tf.keras.Model(ids, tf.keras.layers.Embedding(100, 3)(ids))
        >>> model = distributed_model(model)
        >>> isinstance(model.layers[1], sok.Embedding), hasattr(model, "save_as_original_model")
        (True, True)
    """
    _begin()
    planned = conversion.plan_of(model, None, sparse_as_dense_size).to_convert
    options = persisting.table_options(len(planned))
    model = sok.distributed_model(model, table=options, sparse_as_dense_size=sparse_as_dense_size)
    if override_method:
        conversion.set_class(model, conversion.named_as(type(model), _Saves, {}))
    _register(model)
    return model


def save_server_model(model: KerasModel, path: PathLike, include_optimizer: bool = True) -> None:
    """Writes the rows of a model's tables, and with `include_optimizer` what optimizers keep of them.

    All workers write their rows, also if only one calls this, as OpenEmbedding's scripts do on worker 0: the others do
    it where they next come to a save, or to the beginning or end of `fit`, of one of its epochs, or of `evaluate` or
    `predict` of a model whose methods are overridden, or to the end of the program. One that comes to none of these
    before the job's deadline (`sok.Init(deadline=)`, 1800 s) ends the job, with words.

    Args:
        model: that `distributed_model` has given, or a `Model`; of another all workers call this.
        path: a folder, which all workers see.
    """
    _by_all("save_server_model", model, os.fspath(path), include_optimizer)


def load_server_model(model: KerasModel, path: PathLike) -> None:
    """Gives a model's tables the rows that `save_server_model` has written, on any number of workers, and what
    optimizers keep of them, if that was written: else they begin anew. As collective as `save_server_model`.

    Also those that OpenEmbedding's own servers have written: see `sok.load_openembedding`.
    """
    _by_all("load_server_model", model, os.fspath(path))


def save_as_original_model(
    model: KerasModel, path: PathLike, overwrite: bool = True, include_optimizer: bool = True, **kwargs: Any
) -> None:
    """Writes a SavedModel of stock ops, also of tables of any id: `sok.export_saved_model`.

    As collective as `save_server_model`.

    Raises:
        ValueError: `include_optimizer` is not False: a SavedModel for serving has no optimizer.
    """
    if include_optimizer:
        raise ValueError("`include_optimizer` must be False: what is served has no optimizer. Received: True.")
    _by_all("save_as_original_model", model, os.fspath(path), overwrite)


def _save_rows(model: Any, path: str, include_optimizer: bool) -> None:
    sok.save(path, model, _optimizer_of(model) if include_optimizer else None)
    if context.rank() == 0:
        with open(os.path.join(path, _META), "w", encoding="utf-8") as file:
            json.dump({"include_optimizer": include_optimizer}, file)


def _load_rows(model: Any, path: str) -> None:
    if its_files.is_checkpoint(path):  # of its own servers
        sok.load_openembedding(path, model)
        return
    has_slots = True
    with contextlib.suppress(FileNotFoundError), open(os.path.join(path, _META), encoding="utf-8") as file:
        has_slots = json.load(file)["include_optimizer"]
    sok.restore(path, model, slots=has_slots)


def should_persist_server_model(model: KerasModel) -> bool:
    """Whether this worker's memory is full of rows of one of the model's tables, and none is being persisted.

    Of a model whose tables are over files: `flags.config` names their folder. Not collective. False as long as no step
    has been trained since `persist_server_model`.
    """
    return persisting.should_persist(model)


def persist_server_model(model: KerasModel, path: PathLike, persist_pending_window: int) -> None:
    """`save_server_model` that leaves rows in their files: `sok.save(path, model, versions=True)`.

    As collective as `save_server_model`.

    Args:
        path: a folder, which all workers see. As long as it is there, its rows can be restored, whatever has been
            persisted since.
        persist_pending_window: 0: returns when all is on the disk. 1 or 2: returns at once, and all is on the disk some
            steps later; the next call, and `restore_server_model`, wait for that.

    Raises:
        ValueError: another window.
    """
    _by_all("persist_server_model", model, os.fspath(path), persist_pending_window)


def restore_server_model(model: KerasModel, path: PathLike) -> None:
    """`load_server_model` of what `persist_server_model` or `save_server_model` has written."""
    _by_all("restore_server_model", model, os.fspath(path))


def _persist_rows(model: Any, path: str, window: int) -> None:
    persisting.persist(model, path, window, _optimizer_of(model))


def _restore_rows(model: Any, path: str) -> None:
    persisting.wait(model)
    _load_rows(model, path)


def _export(model: Any, path: str, overwrite: bool) -> None:
    sok.export_saved_model(model, path, overwrite=overwrite)


def _save(model: Any, path: str, overwrite: bool, include_optimizer: bool) -> None:
    weights, rows = _weights_file(os.path.join(path, _INSIDE, "model")), os.path.join(path, _INSIDE, "rows")
    if exb.save_server_model is not save_server_model:  # a script's own, for rows that stay where they are
        persisting.save_dense(model, weights)
        exb.save_server_model(model, rows)
        return
    _export(model, path, overwrite)
    _save_weights(model, weights)
    if include_optimizer:
        _save_rows(model, rows, True)


def _load_its_weights(model: Any, path: str, rows: str) -> None:
    """What OpenEmbedding's own `save_weights` or `save` has written; all of it, or nothing."""
    name = "openembedding/load_weights"
    values = agreement.done_by_all(context.get_transport(), name, lambda: dense_weights.read_for(model, path))
    sok.load_openembedding(rows, model)
    for variable, value in values:
        variable.assign(value)


def _save_weights(model: Any, path: str) -> None:
    if context.rank() == 0:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    sok.save_weights(model, path)


def _load_persisted(model: Any, weights: str) -> None:
    persisting.load_dense(model, weights)
    exb.load_server_model(model, os.path.join(os.path.dirname(weights), "rows"))


_BY_ALL = {
    "load_persisted": _load_persisted,
    "save": _save,
    "save_weights": _save_weights,
    "load_weights": sok.load_weights,
    "load_its_weights": _load_its_weights,
    "save_server_model": _save_rows,
    "load_server_model": _load_rows,
    "persist_server_model": _persist_rows,
    "restore_server_model": _restore_rows,
    "save_as_original_model": _export,
}


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
        else:
            _by_all("save_weights", self, _weights_file(filepath))

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if store_files.leaves_rows_out():
            super().load_weights(filepath, *args, **kwargs)  # type: ignore[misc]
            return
        path = _weights_file(filepath)
        if exb.load_server_model is not load_server_model:  # a script's own: see _save
            places = (os.fspath(filepath), os.path.join(os.path.dirname(os.fspath(filepath)), os.pardir))
            saved = [os.path.normpath(os.path.join(place, _INSIDE, "model.weights.h5")) for place in places]
            if (weights := next(filter(os.path.exists, saved), None)) is not None:
                _by_all("load_persisted", self, weights)
                return
        inside = os.path.join(os.path.dirname(os.fspath(filepath)), os.pardir, _INSIDE, "model.weights.h5")
        found = next((one for one in (path, inside) if os.path.exists(one)), None)
        if found is None:
            theirs = (f"{os.fspath(filepath)}.openembedding/{_INSIDE}", os.path.dirname(inside))
            rows = next((folder for folder in theirs if its_files.is_checkpoint(folder)), None)
            if rows is not None:
                _by_all("load_its_weights", self, os.fspath(filepath), rows)
                return
            raise OSError(f"There are no weights in {path!r}, nor in {os.path.normpath(inside)!r}.")
        _by_all("load_weights", self, found)

    def save(self, filepath: Any, overwrite: bool = True, include_optimizer: bool = True, **kwargs: Any) -> None:
        _by_all("save", self, os.fspath(filepath), overwrite, include_optimizer)

    def save_as_original_model(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        save_as_original_model(self, os.fspath(filepath), overwrite, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._meet("evaluate")
        return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self._meet("predict")
        return super().predict(*args, **kwargs)  # type: ignore[misc]

    def make_train_function(self, *args: Any, **kwargs: Any) -> Any:
        super().make_train_function(*args, **kwargs)  # type: ignore[misc]
        joining.begin_fit(self)
        return self.train_function  # type: ignore[attr-defined] # tf_keras takes it from here

    def _meet(self, where: str) -> None:
        if (
            context.size() > 1 and keras_calls.fit_that_runs() is None
        ):  # where workers meet when all have ended an epoch
            meeting.together(f"model.{where}", lambda: None)


class Model(_Saves, tf.keras.Model):
    """`tf.keras.Model`, to be subclassed, with `save`, `save_weights` and `load_weights` that keep rows, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _begin()
        _register(self)


def pulling(dataset: tf.data.Dataset, model: KerasModel, steps: int | None = None) -> tf.data.Dataset:
    """`sok.prefetch(dataset, model)`, of the first `steps` batches; None: of all."""
    return sok.prefetch(dataset if steps is None else dataset.take(steps), model)


def _distributed(name: str) -> Any:
    made = getattr(tf.keras.optimizers, name)

    @functools.wraps(made, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        return distributed_optimizer(made(*args, **kwargs))

    make.__doc__ = f"`distributed_optimizer(tf.keras.optimizers.{name}(...))`."
    return make


Adadelta, Adagrad, Adam, Adamax = map(_distributed, ("Adadelta", "Adagrad", "Adam", "Adamax"))
Ftrl, Nadam, RMSprop, SGD = map(_distributed, ("Ftrl", "Nadam", "RMSprop", "SGD"))


def _not_here(name: str, instead: str) -> Any:
    return refused(f"openembedding.tensorflow.{name}", instead)


Variable = _not_here("Variable", "a table is a sok.EmbeddingVariable, looked up by sok.lookup_sparse.")

exb = types.SimpleNamespace(**{name: globals()[name] for name in __all__ if name not in ("exb", "flags")})
