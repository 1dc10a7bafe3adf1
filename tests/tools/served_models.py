"""What the tests of `sok serve` serve, and the client that asks."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

import sok

IDS = tf.TensorSpec([None, None], tf.int64, name="ids")


class Sums(tf.Module):
    """The sum of the rows of each sample's ids."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def __call__(self, ids):
        return sok.lookup_sparse(self.table, ids, combiners="sum")


def export_with(value: float, path: Path, native: bool = False) -> None:
    """A model that answers `value` for id 7, and 0 for any other."""
    table = sok.EmbeddingVariable(1, 10, name=f"served_{value:g}_{native}", initializer="zeros")
    table.assign([7], [[value]])
    sok.export_saved_model(Sums(table), path, signatures=IDS, native=native)


class Kinds(tf.Module):
    """A signature for each question about types; what is slow sleeps."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.uint64, "a"), tf.TensorSpec([None, 2], tf.float32, "b")])
    def two(self, a, b):
        return {"keys": a, "half": b / 2}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
    def strings(self, text):
        return {"same": text, "same_bytes": text}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    def logarithm(self, x):
        return {"y": tf.math.log(x), "rows": tf.shape(x)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, "at")])
    def gathered(self, at):
        return {"y": tf.gather([1.0, 2.0, 3.0], at)}

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64, "ms")])
    def slow(self, ms):
        slept = (
            tf.data.Dataset.range(ms).apply(testing.sleep(1000)).reduce(tf.constant(0, tf.int64), lambda n, _: n + 1)
        )
        return {"slept": slept}


def save_kinds(path: Path) -> None:
    kinds = Kinds()
    names = ("two", "strings", "logarithm", "gathered", "slow")
    tf.saved_model.save(kinds, str(path), signatures={name: getattr(kinds, name) for name in names})


def publish(export: Path, version: Path, damage: Callable[[Path], None] | None = None) -> None:
    """As the guide says: written beside, then renamed. `damage`: what befalls it before."""
    partial = version.with_name(f"{version.name}.partial")
    shutil.copytree(export, partial)
    if damage is not None:
        damage(partial)
    os.rename(partial, version)


class Client:
    """One connection, kept open."""

    def __init__(self, port: int, deadline: float = 120.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and answer; `body`: bytes as they are, else as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self._connection.request(method, path, body, headers or {})
        answer = self._connection.getresponse()
        told = answer.read()
        return answer.status, json.loads(told) if answer.headers["Content-Type"].startswith(
            "application/json"
        ) else told

    def close(self) -> None:
        self._connection.close()


def ask(port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """The same, by a connection of its own."""
    client = Client(port)
    try:
        return client.ask(method, path, body, headers)
    finally:
        client.close()
