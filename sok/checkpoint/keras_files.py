"""`save_weights` and `load_weights`: Keras' file of dense weights, and tables beside it, for any number of workers."""

from __future__ import annotations

import os
from typing import Any

from sok import context
from sok.checkpoint import beside, store_files
from sok.checkpoint.agreement import check_equal, together
from sok.checkpoint.targets import tables_of


def save_weights(model: Any, path: str | os.PathLike) -> None:
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
    beside.save_tables(os.fspath(path), list(tables.values()))

    def dense() -> None:
        if transport.rank == 0:
            beside.note_objects(os.fspath(path), tables)
            with store_files.leaving_rows_out():
                model.save_weights(path)

    together(transport, "sok/keras/save", dense)


def load_weights(model: Any, path: str | os.PathLike) -> None:
    """Gives a Keras model and its tables what `save_weights` has written, on any number of workers.

    Args:
        model: built, with the layers that were saved.
        path: as it was given to `save_weights`; the same on all workers.

    Raises:
        ValueError: the name differs between workers; the model has no table.
        FileNotFoundError: there is no such file, or no folder beside it.
        as `sok.restore`, and what Keras says of the dense weights, which may have changed by then.

    Collective: call it on all workers between steps.

    Example: see `sok.save_weights`.
    """
    tables = _checked("sok.load_weights", model, path)

    def dense() -> None:
        folder = beside.folder_of(os.fspath(path))
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{folder}: no such folder, where sok.save_weights puts tables. A file that one worker alone has saved "
                "with model.save_weights is loaded so, too: with model.load_weights, by one worker."
            )
        optimizer = getattr(model, "optimizer", None)
        if not getattr(optimizer, "built", True):
            optimizer.build(model.trainable_variables)  # Keras 3 would leave its state out
        with store_files.leaving_rows_out():
            model.load_weights(path)

    together(context.get_transport(), "sok/keras/load", dense)
    beside.restore_tables(os.fspath(path), tables)


def _checked(who: str, model: Any, path: str | os.PathLike) -> dict[str, Any]:
    """The model's tables by their place in it."""
    tables: dict[str, Any] = {}

    def plan() -> Any:
        if not os.fspath(path).endswith(".weights.h5"):
            raise ValueError(f"`path` must end in '.weights.h5'. Received: {os.fspath(path)!r}.")
        tables.update((str(place), table) for place, table in enumerate(tables_of(model).values()))
        return [os.path.abspath(path), [[place, table.table_name] for place, table in tables.items()]]

    check_equal(together(context.get_transport(), "sok/keras/plan", plan), f"{who}: [path, tables]")
    return tables
