"""Kinds of tables: who made one, what its keys are, and which worker holds which row."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import sok
from sok import deeprec
from sok.layers import for_keras
from sok.lookup.lookup import lookup_rows
from sok.table.placement import Placement
from tests.placements import ALL_PLACEMENTS

DIM = 3
NUM_ROWS = 40  # of an identity table, and what a worker of a hashed one has room for
INITIALIZER = tf.keras.initializers.RandomUniform(-0.5, 0.5, seed=3)


@dataclasses.dataclass
class Made:
    """A table and how its maker's users look it up."""

    table: sok.EmbeddingVariable
    look_up: Callable[[tf.Tensor, Any], tf.Tensor]  # (keys [n], training) -> [n, DIM]
    layer: Any = None  # of Keras, if that is what has the table
    copies: Any = None  # what can be copied by its configuration
    erased: float | None = None  # what an erased row reads as; None: its initial value

    def __post_init__(self) -> None:
        self.key_dtype = getattr(self.table, "key_type", self.table.key_dtype)

    def rows(self, keys: Any, training: Any = True) -> tf.Tensor:
        return tf.reshape(self.look_up(tf.convert_to_tensor(keys, self.key_dtype), training), [-1, DIM])


@dataclasses.dataclass(frozen=True)
class Kind:
    maker: str
    keys: str  # the dtype, with "identity " before it if keys are row numbers
    placement: str  # of tests/placements.py

    @property
    def hashed(self) -> bool:
        return not self.keys.startswith("identity")

    @property
    def key_dtype(self) -> tf.DType:
        return tf.as_dtype(self.keys.rpartition(" ")[2])

    @property
    def placed(self) -> Placement:
        return ALL_PLACEMENTS[self.placement](sok.size())

    @property
    def mode(self) -> str:
        return "distributed" if self.placed.owner is None else f"localized:{self.placed.owner}"

    @property
    def capacity(self) -> int:
        return NUM_ROWS if self.hashed else self.placed.share(NUM_ROWS, sok.size())

    def pool(self) -> np.ndarray:
        """Legal keys: for hashed tables the ends of the dtype, what lies beyond the capacity, and neighbours."""
        dtype = np.dtype(self.key_dtype.as_numpy_dtype)
        if not self.hashed:
            return np.array([0, 1, 2, 3, 5, 8, 13, 21, 34, NUM_ROWS - 1, 9, 10], dtype)
        low = 0 if self.maker.startswith("column") else np.iinfo(dtype).min  # columns leave ids below 0 out
        high = np.iinfo(dtype).max - (1 if self.maker.startswith("column") else 0)
        return np.array([low, high, low + 1, high - 1, 7, 8, 100, 2**20, 2**30 + 1, 11, 12, 13], dtype)

    def make(self, name: str) -> Made:
        return MAKERS[self.maker].make(self, name)

    def __str__(self) -> str:
        return f"{self.maker}-{self.keys}-{self.placement}".replace(" ", "_")


def _variable(kind: Kind, name: str) -> Made:
    table = sok.EmbeddingVariable(
        DIM,
        kind.capacity,
        name=name,
        key_dtype=kind.key_dtype,
        hashed=kind.hashed,
        placement=kind.placed,
        initializer=INITIALIZER,
    )
    return Made(table, lambda keys, training: lookup_rows(table, keys, training))


def _with_policies(kind: Kind, name: str) -> Made:
    table = sok.EmbeddingVariable(
        DIM,
        kind.capacity,
        name=name,
        placement=kind.placed,
        initializer=INITIALIZER,
        admission=sok.Admission(after=2),
        eviction=sok.Eviction(older_than=3, every=2),
    )
    return Made(table, lambda keys, training: lookup_rows(table, keys, training))


def _over_a_file(kind: Kind, name: str) -> Made:
    table = sok.EmbeddingVariable(
        DIM,
        kind.capacity,
        name=name,
        hashed=kind.hashed,
        placement=kind.placed,
        initializer=INITIALIZER,
        storage=sok.Storage(memory_bytes=2**23, path=_FOLDER.name),
    )
    return Made(table, lambda keys, training: lookup_rows(table, keys, training))


ENVIRONMENT = {"SOK_STORAGE_FRAMES": "4", "SOK_STORAGE_SEGMENT_BYTES": "4096"}
"""Of all cells: tables over a file have 4 rows in memory, of the 12 of a pool."""

_FOLDER = tempfile.TemporaryDirectory(prefix="sok_matrix_")


def _of_v2(table: sok.EmbeddingVariable, **more: Any) -> Made:
    return Made(table, lambda keys, training: sok.all2all_dense_embedding(table, keys), **more)


def _static(kind: Kind, name: str) -> Made:
    return _of_v2(sok.Variable(shape=(NUM_ROWS, DIM), initializer=INITIALIZER, name=name, mode=kind.mode))


def _of_array(kind: Kind, name: str) -> Made:
    matrix = np.random.default_rng(4).uniform(-0.5, 0.5, (NUM_ROWS, DIM)).astype(np.float32)
    return _of_v2(sok.Variable(matrix, name=name, mode=kind.mode), erased=0.0)


def _dynamic(kind: Kind, name: str) -> Made:
    return _of_v2(
        sok.DynamicVariable(
            DIM, INITIALIZER, name=name, key_type=kind.key_dtype, placement=kind.placed, max_capacity=kind.capacity
        )
    )


def _of_deeprec(kind: Kind, name: str) -> Made:
    table = deeprec.get_embedding_variable(
        name,
        DIM,
        key_dtype=kind.key_dtype,
        initializer=INITIALIZER,
        capacity=kind.capacity,
        placement=kind.placed,
    )

    def look_up(keys: tf.Tensor, training: Any) -> tf.Tensor:
        return sok.group_embedding_lookup([table], [keys])[0]

    return Made(table, look_up)


def _layer(which_keras: Any, layer_class: Any, *first: Any, **lengths: int) -> Callable[[Kind, str], Made]:
    def make(kind: Kind, name: str) -> Made:
        layer = layer_class(
            *first,
            kind.capacity,
            DIM,
            slot_num=1,
            use_hashtable=kind.hashed,
            key_dtype=kind.key_dtype,
            embedding_initializer=which_keras.initializers.RandomUniform(-0.5, 0.5, seed=3),
            name=name,
            placement=kind.placed,
            **lengths,
        )

        def look_up(keys: tf.Tensor, training: Any) -> tf.Tensor:
            return layer(keys[:, None], training=training)

        return Made(layer.embedding_variable, look_up, layer=layer, copies=layer)

    return make


def _through_table(kind: Kind, name: str) -> Made:
    options = sok.TableOptions(
        key_dtype=kind.key_dtype, hashed=kind.hashed, placement=kind.placed, initializer=INITIALIZER, way_home="sums"
    )
    layer = sok.DistributedEmbedding("sum", kind.capacity, DIM, slot_num=1, max_nnz=1, name=name, table=options)

    def look_up(keys: tf.Tensor, training: Any) -> tf.Tensor:
        return layer(keys[:, None], training=training)

    return Made(layer.embedding_variable, look_up, layer=layer, copies=layer)


def _pooling_layer(which_keras: Any) -> Callable[[Kind, str], Made]:
    return _layer(which_keras, for_keras(which_keras).DistributedEmbedding, "sum", max_nnz=1)


def _column(kind: Kind, name: str) -> Made:
    ids = tf.feature_column.categorical_column_with_identity(name, 2**63 - 1 if kind.hashed else NUM_ROWS)
    column = sok.feature_column.embedding_column(
        ids,
        DIM,
        "sum",
        tf.compat.v1.random_uniform_initializer(-0.5, 0.5, seed=3),
        capacity=kind.capacity if kind.hashed else None,
        placement=kind.placed,
    )
    layer = tf_keras.layers.DenseFeatures([column], name=name)

    def look_up(keys: tf.Tensor, training: Any) -> tf.Tensor:
        return layer({name: keys[:, None]}, training=training)

    look_up(tf.constant([1], tf.int64), False)  # makes the table, and no row
    (table,) = sok.filter_variables(layer.weights)[0]
    return Made(table, look_up, copies=column)


HASHED = ("int64", "int32", "uint32", "uint64")
IDENTITY = tuple(f"identity {dtype}" for dtype in HASHED)
ANYWHERE = ("by key", "by hash", "one worker")
ON_EACH = ("columns", "copies")  # several workers hold something of each row
ON_SEVERAL = "EmbeddingVariable with each row on several workers"
ON_SOME = "EmbeddingVariable on some workers"
WITH_POLICIES = "EmbeddingVariable that admits and evicts"
OVER_A_FILE = "EmbeddingVariable over a file"


@dataclasses.dataclass(frozen=True)
class Maker:
    """Who makes tables, and which of them."""

    make: Callable[[Kind, str], Made]
    keys: tuple[str, ...]
    placements: tuple[str, ...] = ANYWHERE


MAKERS = {
    "EmbeddingVariable": Maker(_variable, HASHED + IDENTITY),
    ON_SOME: Maker(_variable, ("int64", "identity int64"), ("upper workers",)),
    ON_SEVERAL: Maker(_variable, ("int64", "identity uint32"), ON_EACH),
    WITH_POLICIES: Maker(_with_policies, ("int64",), ("by key",)),
    OVER_A_FILE: Maker(_over_a_file, ("int64", "identity int64"), ("by key",)),
    "Variable": Maker(_static, ("identity int64",), ("by key", "one worker")),
    "Variable of an array": Maker(_of_array, ("identity int64",), ("by key", "one worker")),
    "DynamicVariable": Maker(_dynamic, HASHED),
    "get_embedding_variable": Maker(_of_deeprec, HASHED),
    "layer of Keras 3": Maker(_pooling_layer(keras), HASHED + IDENTITY),
    "layer of tf_keras": Maker(_pooling_layer(tf_keras), HASHED + IDENTITY),
    "All2AllDenseEmbedding": Maker(_layer(keras, sok.All2AllDenseEmbedding, nnz_per_slot=1), HASHED + IDENTITY),
    "layer of options": Maker(_through_table, ("int64", "identity uint32")),
    "column": Maker(_column, ("int64", "identity int64")),
}

KINDS = [
    Kind(name, keys, placement)
    for name, maker in MAKERS.items()
    for keys, placement in itertools.product(maker.keys, maker.placements)
]
