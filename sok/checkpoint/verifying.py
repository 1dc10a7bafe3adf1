"""`verify`: whether a checkpoint can be restored, without a table."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from sok.base.errors import CheckpointError
from sok.base.progress import on_stderr
from sok.base.types import PathLike
from sok.checkpoint import dense
from sok.checkpoint.manifest import DenseFiles, read_manifest
from sok.checkpoint.native import verify_shard
from sok.checkpoint.summary import check_summary
from sok.checkpoint.tf_checkpoints import SAVER, SUFFIX
from sok.job.agreement import plain_text


def verify(path: PathLike, progress: bool | None = None) -> list[str]:
    """Reads all of a checkpoint and says what is wrong with it.

    Args:
        path: the folder.
        progress: whether to show a bar on stderr. None: if that is a terminal.

    Returns:
        A line for each damaged or missing file; none if the checkpoint is whole.

    Raises:
        FileNotFoundError, CheckpointError: there is no manifest, or it is damaged.

    Not collective, and needs memory for 12 MiB. Does not see a key that is in the checkpoint twice; `restore` does.

    Example:
        >>> import sok, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sok.save(folder, [sok.EmbeddingVariable(dim=2, capacity=10, name="verified")])
        ...     verify(folder)
        []
    """
    path = os.fspath(path)
    manifest = read_manifest(path)
    wrong = []
    with on_stderr("verifying", manifest.bytes, progress, "bytes") as bar:
        for link in manifest.links:
            for table, file in ((t, file) for t in link.tables for file in t.files):
                name = os.path.join(path, file.name)
                try:
                    check_summary(name, link, table, file, verify_shard(name))
                except (CheckpointError, tf.errors.OpError) as error:
                    wrong.append(plain_text(error))
                bar.add(file.bytes)
        if manifest.dense is not None:
            wrong += _verify_dense_of(path, manifest.dense)
    return wrong


def _verify_dense_of(path: str, files: DenseFiles) -> list[str]:
    try:
        dense.Reader(path, files)
    except CheckpointError as error:
        return [plain_text(error)]
    return verify_dense(os.path.join(path, files.name))[0]


def verify_dense(prefix: str) -> tuple[list[str], int]:
    """Reads the variables of a `tf.train.Checkpoint`; says what is wrong with them, and whether its tables are missing.

    Returns:
        A line for each variable that cannot be read, and the bytes of the others. Rows of tables are not read.
    """
    wrong, size = [], 0
    try:
        reader = tf.train.load_checkpoint(prefix)
    except _UNREADABLE as error:
        return [f"{prefix}.index: {plain_text(error)}"], 0
    for name in sorted(reader.get_variable_to_shape_map()):
        try:
            value = reader.get_tensor(name)  # TensorFlow looks at its checksum
        except _UNREADABLE as error:
            wrong.append(f"{prefix}: '{name}': {plain_text(error)}")
            continue
        if name != _OBJECTS:
            size += np.asarray(value).nbytes
        elif _has_tables(value) and not os.path.isdir(prefix + SUFFIX):
            wrong.append(f"{prefix}{SUFFIX}: not there: the rows of the checkpoint's tables are missing.")
    return wrong, size


_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"  # where TensorFlow says which objects there are
_UNREADABLE = (tf.errors.OpError, IndexError, ValueError, RuntimeError)  # its reader gives of errors what it likes


def _has_tables(objects: bytes) -> bool:
    return any(node.registered_saver.name == SAVER for node in TrackableObjectGraph.FromString(objects).nodes)
