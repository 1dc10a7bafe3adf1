"""Whether the tables of a native export are whole."""

from __future__ import annotations

import os
from typing import Any

from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import saved_model_pb2

from sok.saved_model.serving_file import REMOTE, Head, verify_file
from sok.saved_model.table_file import TableFile


def read_saved_model(path: str) -> Any:
    """The protocol buffer of the SavedModel at `path`.

    Raises:
        OSError: there is none.
        ValueError: it is damaged.
    """
    name = os.path.join(path, "saved_model.pb")
    model = saved_model_pb2.SavedModel()
    try:
        with open(name, "rb") as file:
            model.ParseFromString(file.read())
    except DecodeError as error:
        raise ValueError(f"{name}: not a SavedModel: {error}.") from None
    return model


def verify_export(path: str) -> tuple[list[Head], list[str]]:
    """Reads the tables of the SavedModel at `path` to their ends; of those with rows in Redis, these.

    Returns:
        What the whole ones say of themselves, and a line for each that is damaged or missing.

    Raises:
        OSError: there is no SavedModel.
        ValueError: it is damaged, or no native export: TensorFlow checks the variables of others when it reads them.

    Example:
        >>> import sok, tempfile, tensorflow as tf
        >>> table = sok.EmbeddingVariable(2, 100, name="verified_export")
        >>> path = tempfile.mkdtemp() + "/1"
        >>> spec = tf.TensorSpec([None, None], tf.int64, "ids")
        >>> report = sok.export_saved_model(table.sparse_read, path, signatures=spec, native=True)
        >>> tables, wrong = verify_export(path)
        >>> (tables[0].dim, wrong)
        (2, [])
    """
    model = read_saved_model(path)
    # With paths they would lead out of the folder.
    names = sorted({os.path.basename(a.filename) for meta in model.meta_graphs for a in meta.asset_file_def})
    files = [name for name in names if name.endswith(".sok")]
    if not files:
        raise ValueError(
            f"{path}: a SavedModel without tables of a native export (native=True). The variables of others are "
            "checked by TensorFlow when it reads them."
        )
    tables, wrong = [], []
    for name in files:
        try:
            file = os.path.join(path, "assets", name)
            head = verify_file(file)
            said = []
            if head.flags & REMOTE:
                from sok.saved_model.redis_verifying import verify_rows

                said = verify_rows(TableFile(file))
            wrong += said
            if not said:
                tables.append(head)
        except (OSError, ValueError, ImportError) as error:
            wrong.append(str(error))
    return tables, wrong
