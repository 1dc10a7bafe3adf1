"""Latency of one model, as it trains and as it is exported, in one process: python -m benchmarks.serving.

Prints a table in Markdown: medians and 99th percentiles of calls that take turns, so that what else the machine does
falls on all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks import machine

FEATURES, HIDDEN = 26, (64, 32)
BATCHES = (1, 100, 1000)
EXPORTS = {
    "stock": {},
    "zeros": {"default": "zeros"},
    "int8": {"row_dtype": "int8"},
    "native": {"native": True},
    "native int8": {"native": True, "row_dtype": "int8"},
}
SPEC = tf.TensorSpec([None, FEATURES], tf.int64, name="ids")


class OneTable(tf.Module):
    """All features in one hashed table."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.embedding = sok.DistributedEmbedding("sum", rows, dim, slot_num=FEATURES, max_nnz=1)
        self.tables = [self.embedding.embedding_variable]
        self.head = make_head()

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        vectors = self.embedding(ids, training=False)
        return self.head(tf.reshape(vectors, [-1, FEATURES * vectors.shape[-1]]))


class TableEach(tf.Module):
    """A hashed table for each feature, looked up as a group."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = [sok.EmbeddingVariable(dim, rows // FEATURES + 1, name=f"of_{f}") for f in range(FEATURES)]
        self.head = make_head()

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        of_features = tf.split(ids, FEATURES, axis=1)
        pooled = sok.group_embedding_lookup_sparse(self.tables, of_features, "sum", training=False)
        return self.head(tf.concat(pooled, 1))


def make_head() -> Any:
    layers = [tf.keras.layers.Dense(width, "relu") for width in HIDDEN]
    return tf.keras.Sequential([*layers, tf.keras.layers.Dense(1, "sigmoid")])


def fill(model: Any, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Stores `rows` rows of random keys in the tables, in equal parts; gives the keys of each feature [FEATURES, n]."""
    keys = rng.integers(-(2**62), 2**62, [FEATURES, rows // FEATURES])
    for f, of_feature in enumerate(keys):
        table = model.tables[f % len(model.tables)]
        table.assign(of_feature, rng.normal(size=(len(of_feature), table.dim)).astype(np.float32))
    return keys


def ids_of(keys: np.ndarray, batch: int, unseen: float, rng: np.random.Generator) -> tf.Tensor:
    """[batch, FEATURES] of the stored keys, uniform; a share `unseen` of others."""
    chosen = np.stack([rng.choice(of_feature, batch) for of_feature in keys], 1)
    others = rng.integers(-(2**62), 2**62, chosen.shape)
    return tf.constant(np.where(rng.random(chosen.shape) < unseen, others, chosen))


def in_turns(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, np.ndarray]:
    """Milliseconds of each call, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 20:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: np.array(of_call) for name, of_call in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows in all tables together")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--unseen", type=float, default=0.01, help="share of ids without a row")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    options = parser.parse_args()
    sok.Init()
    described = machine.describe()
    print(f"{described['cpu']}, {described['usable_cores']} cores, TensorFlow {tf.__version__}, {time.strftime('%F')}")
    print(
        f"{options.rows:,} rows x {options.dim} floats, {FEATURES} features of one id, {options.unseen:.0%} unseen, "
        f"head {'-'.join(map(str, HIDDEN))}-1; milliseconds a call, median / 99th percentile\n"
    )
    print("| tables | batch | sok | stock | stock, zeros for unseen | stock, int8 | native | native, int8 |")
    print("|---|---|---|---|---|---|---|---|")
    notes: list[str] = []
    for make in (OneTable, TableEach):
        rng = np.random.default_rng(1)
        model = make(options.rows, options.dim)
        keys = fill(model, options.rows, rng)
        served: dict[str, Any] = {"sok": tf.function(model.__call__, input_signature=[SPEC])}
        with tempfile.TemporaryDirectory() as folder:
            for name, more in EXPORTS.items():
                start = time.perf_counter()
                with contextlib.redirect_stdout(None):
                    sok.export_saved_model(model, f"{folder}/{name}", signatures=SPEC, **more)
                exported = time.perf_counter()
                served[name] = tf.saved_model.load(f"{folder}/{name}").signatures["serving_default"]
                loaded = time.perf_counter() - exported
                notes.append(
                    f"{len(model.tables)} tables, {name}: export {exported - start:.1f} s, load {loaded:.1f} s"
                )
        for batch in BATCHES:
            ids = ids_of(keys, batch, options.unseen, rng)
            calls = {name: functools.partial(_answer, function, ids) for name, function in served.items()}
            for name in ("stock", "native"):
                np.testing.assert_allclose(calls[name](), calls["sok"](), rtol=0, atol=1e-5)
            times = in_turns(calls, options.seconds)
            cells = [f"{np.median(t):.2f} / {np.percentile(t, 99):.2f}" for t in times.values()]
            print(f"| {len(model.tables)} | {batch:,} | {' | '.join(cells)} |", flush=True)
    print("", *notes, sep="\n")


def _answer(function: Callable[..., Any], ids: tf.Tensor) -> np.ndarray:
    outputs = function(ids=ids)
    return (next(iter(outputs.values())) if isinstance(outputs, dict) else outputs).numpy()


if __name__ == "__main__":
    main()
