"""Models that are trained, published and followed, and all that can be seen of their exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows

DIM = 3


def new_table(name: str, dim: int = DIM, capacity: int = 200, **settings: Any) -> sok.EmbeddingVariable:
    return sok.EmbeddingVariable(dim, capacity, name=name, seed=5, **settings)


class Served(tf.Module):
    """Gives the rows of ids in each of its tables, and a score that its dense weights are part of."""

    def __init__(self, *tables: Any) -> None:
        super().__init__()
        self.tables = list(tables)
        self.kernel = tf.Variable(tf.ones([DIM, 1]), name="kernel")
        self.shift = tf.Variable(0.0, name="shift")

    def __call__(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        given = [tf.cast(ids, table.key_dtype) for table in self.tables]
        rows = sok.group_embedding_lookup(self.tables, given, training=False)
        out = {f"rows_{number}": of_table for number, of_table in enumerate(rows)}
        return out | {"score": tf.matmul(rows[0][..., :DIM], self.kernel[None]) + self.shift}


def export(model: tf.Module, path: Path, dtype: tf.DType = tf.int64, **settings: Any) -> Path:
    spec = tf.TensorSpec([None, None], dtype, "ids")
    settings = settings if "rows" in settings else {"native": True, **settings}
    sok.export_saved_model(model, path, signatures=spec, **settings)
    return path


def answers(path: Any, ids: Any) -> dict[str, np.ndarray]:
    """What a version answers to ids [B, n]."""
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    return {name: value.numpy() for name, value in served(ids=tf.constant(np.asarray(ids))).items()}


def assert_same_answers(path: Any, other: Any, ids: Any) -> None:
    found, expected = answers(path, ids), answers(other, ids)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_same_export(path: Any, other: Any) -> None:
    """Two native exports are one: files of tables byte for byte, variables, and what is told of the tables."""
    for file in sorted(Path(other, "assets").iterdir()):
        assert Path(path, "assets", file.name).read_bytes() == file.read_bytes(), file.name
    assert [f.name for f in sorted(Path(path, "assets").iterdir())] == [
        f.name for f in sorted(Path(other, "assets").iterdir())
    ]
    found, expected = (tf.train.load_checkpoint(f"{one}/variables/variables") for one in (path, other))
    for name in expected.get_variable_to_shape_map():
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
            np.testing.assert_array_equal(found.get_tensor(name), expected.get_tensor(name), err_msg=name)
    counts = [[(t["name"], t["num_rows"], t["num_bytes"]) for t in told(one)["tables"]] for one in (path, other)]
    assert counts[0] == counts[1]


def told(path: Any) -> dict[str, Any]:
    return json.loads(Path(path, "assets.extra", "sok.json").read_text())


def train(table: Any, optimizer: Any, keys: Any) -> None:
    """One step that pulls rows of keys to 1; makes those that are not there."""
    with tf.GradientTape() as tape:
        rows = lookup_rows(table, tf.constant(np.asarray(keys, table.key_dtype.as_numpy_dtype)))
        loss = tf.reduce_mean(tf.square(rows - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def shards_of(folder: Any, newest: bool = True) -> list[Path]:
    manifest = sok.checkpoint.read_manifest(folder)
    files = manifest.files if newest else [file for link in manifest.links for file in link.files]
    return [Path(folder, file.name) for file in files]


def flip(path: Path, at: int = -40) -> bytes:
    """Damages one bit of a file; gives what it was."""
    data = path.read_bytes()
    changed = bytearray(data)
    changed[at] ^= 1
    path.unlink()  # so that a file of two names is damaged under this one alone
    path.write_bytes(changed)
    return data
