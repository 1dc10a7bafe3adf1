"""`save_weights` and `load_weights`: Keras' file of dense weights, and tables beside it, for any number of workers."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from sok.base.types import KerasModel, PathLike
from sok.checkpoint import store_files, tf_checkpoints
from sok.checkpoint.arguments import tables_of
from sok.checkpoint.manifest import read_manifest
from sok.job import context
from sok.job.agreement import check_equal, together
from sok.table.policies import counted_by

_ENDING = ".weights.h5"
_ATTRIBUTE = "sok_generation"


def save_weights(model: KerasModel, path: PathLike) -> None:
    """Writes the weights of a Keras model with its tables, on any number of workers.

    Worker 0 writes the dense weights with `model.save_weights(path)`, and every worker its rows into the folder
    `path` + '.sok'. The number of workers may change from save to restore.

    Args:
        model: of Keras 3 or tf_keras, built.
        path: on storage that all workers see, and the same on all of them; ends in '.weights.h5'.

    Raises:
        ValueError: the name does not end so, or differs between workers; the model has no table.
        as `sok.save`, and what Keras says.

    Collective: call it on all workers between steps. An error of one worker is raised on all.

    Example:
        >>> import keras, sok, tempfile
        >>> layer = sok.DistributedEmbedding("sum", 100, 2, slot_num=1, max_nnz=1)
        >>> model = keras.Sequential([keras.Input([1], dtype="int64"), layer])
        >>> layer.embedding_variable.assign([3], [[1.0, 2.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save_weights(model, folder + "/model.weights.h5")
        ...     _ = layer.embedding_variable.erase([3])
        ...     sok.load_weights(model, folder + "/model.weights.h5")
        >>> layer.embedding_variable.sparse_read([3]).numpy().tolist()
        [[1.0, 2.0]]
    """
    transport = context.get_transport()
    tables = _checked("sok.save_weights", model, path)
    tf_checkpoints.save_tables(os.fspath(path), list(tables.values()))

    def dense() -> None:
        if transport.rank == 0:
            tf_checkpoints.note_objects(os.fspath(path), tables)
            # In one step, and with the name of the tables' save: a program that is killed here leaves tables and dense
            # weights of two epochs, which `load_weights` then refuses.
            partial = os.fspath(path).removesuffix(_ENDING) + ".tmp" + _ENDING
            try:
                with store_files.leaving_rows_out():
                    model.save_weights(partial)
                _sign(partial, read_manifest(tf_checkpoints.folder_of(os.fspath(path))).generation)
                os.replace(partial, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise

    together(transport, "sok/keras/save", dense)


def load_weights(model: KerasModel, path: PathLike) -> None:
    """Gives a Keras model and its tables what `save_weights` has written, on any number of workers.

    Args:
        model: built, with the layers that were saved.
        path: as it was given to `save_weights`; the same on all workers.

    Raises:
        ValueError: the name differs between workers; the model has no table; the tables in the folder are not those
            that were saved with the dense weights, as when a program was killed between the two. (What older versions
            of sok have saved does not say so.)
        FileNotFoundError: there is no such file, or no folder of its tables.
        as `sok.restore`, and what Keras says of the dense weights, which may have changed by then.

    Collective: call it on all workers between steps.

    Example: see `sok.save_weights`.
    """
    tables = _checked("sok.load_weights", model, path)

    def dense() -> None:
        folder = tf_checkpoints.folder_of(os.fspath(path))
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{folder}: no such folder, where sok.save_weights puts tables. A file that one worker alone has saved "
                "with model.save_weights is loaded so, too: with model.load_weights, by one worker."
            )
        _check_signed(os.fspath(path), folder)
        optimizer: Any = getattr(model, "optimizer", None)
        if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(model.trainable_variables)  # Keras would leave its state out
        with store_files.leaving_rows_out():
            model.load_weights(path)

    together(context.get_transport(), "sok/keras/load", dense)
    tf_checkpoints.restore_tables(os.fspath(path), _as_saved(os.fspath(path), tables))


def _sign(path: str, generation: str) -> None:
    """Writes down in a file of dense weights with which save of the tables it goes, and brings it to the disk."""
    import h5py

    with h5py.File(path, "r+") as file:
        file.attrs[_ATTRIBUTE] = generation
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_signed(path: str, folder: str) -> None:
    import h5py

    with h5py.File(path, "r") as file:
        generation = file.attrs.get(_ATTRIBUTE)
    found = read_manifest(folder)
    if generation not in (None, found.generation, found.same_as):
        raise ValueError(
            f"{path}: these dense weights were saved with the tables of {generation}, and in {folder} lie those of "
            f"{found.generation}: a program was killed between the two, or only one of them was copied. Load another "
            "checkpoint; or restore the tables alone, with sok.restore."
        )


def _checked(who: str, model: Any, path: PathLike) -> dict[str, Any]:
    """The model's tables by their place in it."""
    tables: dict[str, Any] = {}

    def plan() -> Any:
        if not os.fspath(path).endswith(_ENDING):
            raise ValueError(f"`path` must end in '{_ENDING}'. Received: {os.fspath(path)!r}.")
        tables.update((str(place), table) for place, table in enumerate(tables_of(model).values()))
        return [os.path.abspath(path), [[place, table.table_name] for place, table in tables.items()]]

    check_equal(together(context.get_transport(), "sok/keras/plan", plan), f"{who}: [path, tables]")
    return tables


def _as_saved(path: str, tables: dict[str, Any]) -> dict[str, Any]:
    """The tables as the folder beside `path` knows them: by name if it has the same names, else by their place."""
    by_name = {table.table_name: table for table in tables.values()}
    names = [table.name for table in read_manifest(tf_checkpoints.folder_of(path)).tables]
    saved = {name for name in names if counted_by(name) is None}
    return by_name if saved == set(by_name) else tables
