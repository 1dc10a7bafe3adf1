"""Variables of a SavedModel that are written piece by piece, so that no process ever holds one of them whole.

A TensorFlow checkpoint may hold a tensor in slices, as it does for partitioned variables. Each piece is a checkpoint of
its own; in the end they are merged, which renames files and writes a new index.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok.checkpoint.manifest import sync_folder
from sok.saved_model.frozen_table import StandsForTable

# What is collected before it is written: small tables share a file.
FILE_BYTES = 32 << 20
_PADDING = "sok_padding"  # a tensor that nobody reads, where there must be one more file


class PiecewiseCheckpoint:
    """Takes the place of the checkpoint at `prefix`, but for the tensors that are added here.

    Args:
        prefix: path of the checkpoint, without '.index'. Its tensors must fit into memory.
        folder: where the pieces lie until `finish`, on the same file system.
    """

    def __init__(self, prefix: str, folder: str) -> None:
        self._prefix, self._folder = prefix, folder
        self._waiting: list[tuple[str, str, np.ndarray]] = []  # name, slice, values
        self._pieces: list[str] = []
        self._added: set[str] = set()
        tf.io.gfile.makedirs(folder)

    def add(self, name: str, num_rows: int, begin: int, rows: np.ndarray) -> None:
        """Writes rows [begin, begin + n) of the tensor that the checkpoint has under that name."""
        sizes = " ".join(map(str, [num_rows, *rows.shape[1:]]))
        ranges = ":".join([f"{begin},{len(rows)}", *["-"] * (rows.ndim - 1)])
        self._added.add(name)
        self._waiting.append((name, f"{sizes} {ranges}", rows))
        if sum(values.nbytes for _, _, values in self._waiting) >= FILE_BYTES:
            self._flush()

    def finish(self) -> None:
        """Writes the rest, and puts all of it in the place of the old checkpoint."""
        self._add_others()
        self._flush()
        for path in tf.io.gfile.glob(f"{self._prefix}.*"):
            tf.io.gfile.remove(path)
        self._merge(self._prefix)

    def exchange(self) -> None:
        """As `finish`, on a local disk; killed at any moment, the checkpoint is the whole old one or the whole new one.

        Its files are named after their number, which is made another one than that of the old ones: so they lie beside
        these until the index, by one renaming, takes the old index' place.
        """
        variables = os.path.dirname(self._prefix)
        old = data_files(self._prefix)
        self._flush()
        self._add_others()
        self._flush()
        if len(self._pieces) == len(old):
            self._waiting.append((_PADDING, "", np.zeros(1, np.float32)))
            self._flush()
        merged = os.path.join(f"{self._folder}.merged", os.path.basename(self._prefix))
        self._merge(merged)
        for path in data_files(merged):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.rename(path, os.path.join(variables, os.path.basename(path)))
        with open(f"{merged}.index", "rb") as file:
            os.fsync(file.fileno())
        sync_folder(variables)
        os.rename(f"{merged}.index", f"{self._prefix}.index")
        sync_folder(variables)
        sweep(self._prefix, self._folder)

    def _add_others(self) -> None:
        """The tensors that were not added, as they are."""
        reader = tf.train.load_checkpoint(self._prefix)
        names = set(reader.get_variable_to_shape_map())
        if not self._added <= names:
            raise RuntimeError(f"{self._prefix} has no variables {sorted(self._added - names)}.")
        self._waiting += [(name, "", reader.get_tensor(name)) for name in sorted(names - self._added - {_PADDING})]

    def _merge(self, prefix: str) -> None:
        _run(
            lambda: tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=self._pieces, destination_prefix=prefix, delete_old_dirs=True
            )
        )

    def _flush(self) -> None:
        if not self._waiting:
            return
        names, slices, values = zip(*self._waiting, strict=True)
        piece = f"{self._folder}/{len(self._pieces)}"
        _run(
            lambda *tensors: tf.raw_ops.SaveV2(
                prefix=piece, tensor_names=names, shape_and_slices=slices, tensors=tensors
            ),
            *values,
        )
        self._pieces.append(piece)
        self._waiting = []


def data_files(prefix: str) -> list[str]:
    """The files beside a checkpoint's index: of an interrupted `exchange` those of two checkpoints."""
    return sorted(glob.glob(f"{glob.escape(prefix)}.data-*"))


def sweep(prefix: str, folder: str) -> None:
    """Removes what an interrupted `exchange` has left: files that the index does not name, and those in `folder`."""
    for left in (folder, f"{folder}.merged"):
        shutil.rmtree(left, ignore_errors=True)
    sets = {path.rpartition("-of-")[2] for path in data_files(prefix)}
    if len(sets) > 1:
        current = next(number for number in sorted(sets) if _is_read_from(prefix, folder, number))
        for path in data_files(prefix):
            if not path.endswith(f"-of-{current}"):
                os.unlink(path)
    sync_folder(os.path.dirname(prefix))


def _is_read_from(prefix: str, folder: str, number: str) -> bool:
    """Whether the index of a checkpoint is that of the data files with this number in their names."""
    os.makedirs(folder)
    try:
        for path in [f"{prefix}.index", *(p for p in data_files(prefix) if p.endswith(f"-of-{number}"))]:
            os.link(path, os.path.join(folder, os.path.basename(path)))
        reader = tf.train.load_checkpoint(os.path.join(folder, os.path.basename(prefix)))
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
        return True
    except (tf.errors.OpError, RuntimeError):
        return False
    finally:
        shutil.rmtree(folder)


class Variables:
    """The variables of tables, in a checkpoint. `name_of` says what it calls a variable of a table."""

    def __init__(self, checkpoint: PiecewiseCheckpoint, name_of: Callable[[Any, str], str]) -> None:
        self._checkpoint, self._name_of = checkpoint, name_of

    def writer(self, frozen: StandsForTable, num_rows: int, words: np.ndarray | None) -> _Writer:
        """What takes the rows of a table, whose keys are `words` (None: all of an identity table)."""
        return _Writer(self._checkpoint, lambda variable: self._name_of(frozen, variable), num_rows, words)

    def finish(self) -> None:
        """When all tables are written."""
        self._checkpoint.finish()


def variables_in(folder: str, name_of: Callable[[Any, str], str]) -> Variables:
    """Those of the SavedModel in a folder."""
    return Variables(PiecewiseCheckpoint(f"{folder}/variables/variables", f"{folder}/variables/pieces"), name_of)


class _Writer:
    def __init__(
        self,
        checkpoint: PiecewiseCheckpoint,
        name_of: Callable[[str], str],
        num_rows: int,
        words: np.ndarray | None,
    ) -> None:
        self._checkpoint, self._name_of, self._num_rows, self._words = checkpoint, name_of, num_rows, words
        self.num_bytes = 0

    def add(self, begin: int, values: dict[str, np.ndarray]) -> None:
        if self._words is not None:
            values = {**values, "keys": self._words[begin : begin + len(values["rows"])]}
        for variable, of_rows in values.items():
            self._checkpoint.add(self._name_of(variable), self._num_rows, begin, of_rows)
            self.num_bytes += of_rows.nbytes

    def finish(self) -> None:
        """Nothing: the checkpoint is finished once, for all tables."""

    def close(self) -> None:
        """Nothing is open."""


def _run(build: Callable[..., Any], *arrays: Any) -> None:
    """Does what `build` says with the arrays as tensors, also where TensorFlow does not execute eagerly."""
    with tf.device("/CPU:0"), tf.init_scope():
        if tf.executing_eagerly():
            build(*map(tf.constant, arrays))
            return
    with tf.Graph().as_default(), tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})) as s:
        # Fed: constants would be part of the graph, which has no room for 2 GB.
        given = [tf.compat.v1.placeholder(tf.as_dtype(np.asarray(a).dtype), np.shape(a)) for a in arrays]
        s.run(build(*given), dict(zip(given, arrays, strict=True)))
