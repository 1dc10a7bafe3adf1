"""Tables, models and their training, by public names that commit 3b85c57 has too: whoever runs it gets the same."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sok

DIM = 3
NUM_ROWS = 40  # of the tables whose keys are row numbers
INITIALIZER = "uniform"

RULES = {
    "sgd": lambda: sok.optimizers.SGD(0.1),
    "adagrad": lambda: sok.optimizers.Adagrad(0.1),
    "adam": lambda: sok.optimizers.Adam(0.1),
    "lazy_adam": lambda: sok.optimizers.LazyAdam(0.1),
    "wrapped_adam": lambda: sok.OptimizerWrapper(keras.optimizers.Adam(0.1)),
    "distributed_adagrad": lambda: sok.DistributedOptimizer(keras.optimizers.Adagrad(0.1)),
}

# Of these the slots went into dumps, and into no checkpoint.
STOCK = {
    "momentum": lambda: sok.OptimizerWrapper(keras.optimizers.SGD(0.1, momentum=0.9)),
    "adamax": lambda: sok.OptimizerWrapper(keras.optimizers.Adamax(0.1)),
}

POOLS = {
    "hashed": np.array([-(2**63), 2**63 - 1, -1, 0, 1, 7, 8, 2**40, 100, 1001], np.int64),
    "unsigned": np.array([0, 2**64 - 1, 2**63, 3, 4, 5, 6, 77, 2**33], np.uint64),
    "identity": np.array([0, 1, 2, 3, 5, 8, 13, 21, 34, NUM_ROWS - 1], np.int32),
    "on_one": np.array([-5, 12, 13, 2**50, 99, 6], np.int64),
    "identity_on_one": np.array([0, 1, 2, 3, 20, NUM_ROWS - 1], np.int64),
}


def make_tables(size: int, prefix: str = "") -> dict[str, Any]:
    """One of each kind there was."""
    share, last = -(-NUM_ROWS // size), size - 1
    made = {
        "hashed": dict(capacity=64),
        "unsigned": dict(capacity=64, key_dtype=tf.uint64),
        "identity": dict(capacity=share, key_dtype=tf.int32, hashed=False),
        "on_one": dict(capacity=64, owner=last),
        "identity_on_one": dict(capacity=NUM_ROWS, hashed=False, owner=last),
    }
    return {
        name: sok.EmbeddingVariable(DIM, name=prefix + name, seed=5, initializer=INITIALIZER, **arguments)
        for name, arguments in made.items()
    }


def make_v2(size: int, prefix: str = "") -> dict[str, Any]:
    """What SOK 2.1's names make."""
    return {
        "static": sok.Variable(shape=(NUM_ROWS, DIM), initializer="ones", name=f"{prefix}static"),
        "static_on_one": sok.Variable(
            shape=(NUM_ROWS, DIM), initializer="ones", name=f"{prefix}static_on_one", mode=f"localized:{size - 1}"
        ),
        "dynamic": sok.DynamicVariable(DIM, "ones", name=f"{prefix}dynamic", key_type=tf.int64),
    }


def pool(name: str) -> np.ndarray:
    return POOLS.get(name, POOLS["hashed"] if name == "dynamic" else POOLS["identity"].astype(np.int64))


def train(tables: dict[str, Any], optimizer: Any, steps: range) -> None:
    """Steps that depend on their number alone: each worker does its part of them."""
    for step in steps:
        rng = np.random.default_rng(step)
        mine = {name: rng.choice(pool(name), 8)[sok.rank() :: sok.size()] for name in tables}
        with tf.GradientTape() as tape:
            rows = [sok.all2all_dense_embedding(table, tf.constant(mine[name])) for name, table in tables.items()]
            loss = sum(tf.reduce_sum(tf.square(r - 1.0)) / 2 for r in rows)
        grads = tape.gradient(loss, list(tables.values()))
        optimizer.apply_gradients(list(zip(grads, tables.values(), strict=True)))


def everywhere(keys: Any, *columns: Any) -> list[np.ndarray]:
    """Keys [n] of all workers, sorted, and what belongs to them, [n, ..] each."""
    dtype = np.asarray(keys).dtype
    # Flat: a worker without keys may not know how long what belongs to them is.
    parts = [np.asarray(keys).astype(np.int64), *(np.asarray(column).reshape(-1) for column in columns)]
    if sok.size() > 1:
        parts = [sok.communication.allgather(tf.constant(part)).numpy() for part in parts]
    keys = parts[0].astype(dtype)
    order = np.argsort(keys)
    return [keys[order], *(part.reshape(len(keys), -1)[order] for part in parts[1:])]


def contents(tables: dict[str, Any], optimizer: Any = None) -> dict[str, np.ndarray]:
    """All rows of all workers, and their slots by an optimizer (or a slot set's name): what is recorded."""
    said = {}
    for name, table in tables.items():
        said[f"{name}/keys"], said[f"{name}/rows"] = everywhere(*(part.numpy() for part in table.export()))
        slot_set = getattr(getattr(optimizer, "embedding_optimizer", optimizer), "slot_set", optimizer)
        if slot_set is not None:
            try:
                keys, slots, _ = (part.numpy() for part in table.slots(slot_set))
            except tf.errors.FailedPreconditionError:  # all rows, and so the optimizer's slots, are on another worker
                keys, slots = np.zeros(0, table.key_dtype.as_numpy_dtype), np.zeros(0, np.float32)
            said[f"{name}/slots"] = everywhere(keys, slots)[1]
    return said


IDS = np.array([[1, 2], [2, 3], [9, 9], [2**40, 30]], np.int64)
TARGETS = np.array([[0.0], [1.0], [2.0], [3.0]], np.float32)


def make_model(which: Any = keras, **names: Any) -> Any:
    """Two tables and a dense layer. `which`: Keras 3 or tf_keras."""
    layers = sok.layers.for_keras(which)
    ids = which.Input([2], dtype="int64", name="ids")
    pooled = layers.DistributedEmbedding(
        "mean", 64, DIM, slot_num=2, max_nnz=1, embedding_initializer="uniform", name="pooled"
    )(ids)
    plain = layers.All2AllDenseEmbedding(
        32, 2, slot_num=2, nnz_per_slot=1, use_hashtable=False, embedding_initializer="uniform", name="plain"
    )(ids % 32)
    flat = [which.layers.Flatten()(rows) for rows in (pooled, plain)]
    dense = which.layers.Dense(1, kernel_initializer="ones", name="dense")(which.layers.Concatenate()(flat))
    return which.Model(ids, dense)


def tables_of(model: Any) -> dict[str, Any]:
    return {name: model.get_layer(name).embedding_variable for name in ("pooled", "plain")}


def train_model(model: Any, which: Any = keras, steps: int = 3) -> None:
    model.compile(sok.DistributedOptimizer(which.optimizers.Adam(0.1)), "mse")
    mine = slice(sok.rank(), None, sok.size())
    for _ in range(steps):
        model.train_on_batch(IDS[mine], TARGETS[mine])
