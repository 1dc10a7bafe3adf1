"""python -m benchmarks.conversion --data FOLDER: what conversion does to the AUC of stock Keras models.

For each data set of the folder (benchmarks/real_data.py) and each seed a model of Keras' own layers is trained as it
is, and after `sok.distributed_model`, from the same initial values, with the same samples in the same order. Data of
clicks get a model like DeepFM, data of lists (what a user liked before) one like Wide & Deep. Under Keras 3 a third one
is trained: stock, whose optimizer is given the sum of the gradients of equal ids, as ours are; Keras 3's own squares
them one by one (so do converted models for layers that stay variables).
Prints for each the AUC on the test part, and how far that of the converted one lies above it, seed by seed.
`horovodrun -np 2 python -m benchmarks.conversion ...` spreads the converted ones over two workers, which make the same
global batches; each stock one is trained on one. TF_USE_LEGACY_KERAS=1: tf_keras.
docs/keras.md has the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks.machine import describe
from benchmarks.real_data import Data, read
from examples.criteo.metrics import auc
from sok.job.context import get_transport

keras = tf.keras
KERAS = keras.layers.Layer.__module__.partition(".")[0]
STOCK, SUMMED, CONVERTED = "stock", "stock, equal ids summed", "converted"


def _inputs(data: Data) -> dict[str, Any]:
    return {name: keras.Input([ids.shape[1]], dtype="int64", name=name) for name, ids in data.columns.items()}


def deep_fm(data: Data, dim: int) -> Any:
    """A weight and a vector for each field; products of all pairs of vectors; a network over vectors and numbers."""
    layers, inputs = keras.layers, _inputs(data)
    flat = [layers.Flatten()(layers.Embedding(data.rows[name], dim)(ids)) for name, ids in inputs.items()]
    weights = [layers.Flatten()(layers.Embedding(data.rows[name], 1)(ids)) for name, ids in inputs.items()]
    total = layers.Add()(flat)
    squares = layers.Add()([layers.Multiply()([one, one]) for one in flat])
    pairs = layers.Subtract()([layers.Multiply()([total, total]), squares])
    given = list(inputs.values())
    if data.numbers.shape[1]:
        given.append(keras.Input([data.numbers.shape[1]], name="numbers"))
        flat.append(given[-1])
    deep = layers.Dense(32, "relu")(layers.Dense(64, "relu")(layers.Concatenate()(flat)))
    out = layers.Dense(1, "sigmoid")(layers.Concatenate()([*weights, pairs, deep]))
    return keras.Model(given, out)


def wide_and_deep(data: Data, dim: int) -> Any:
    """A weight for each single id, and a network over the vectors of single ids and the means of those of lists."""
    layers, inputs = keras.layers, _inputs(data)
    wide, deep = [], []
    for name, ids in inputs.items():
        if data.columns[name].shape[1] == 1:
            wide.append(layers.Flatten()(layers.Embedding(data.rows[name], 1)(ids)))
            deep.append(layers.Flatten()(layers.Embedding(data.rows[name], dim)(ids)))
        else:
            rows = layers.Embedding(data.rows[name], dim, mask_zero=True)(ids)
            deep.append(layers.GlobalAveragePooling1D()(rows))
    hidden = layers.Dense(32, "relu")(layers.Dense(64, "relu")(layers.Concatenate()(deep)))
    out = layers.Dense(1, "sigmoid")(layers.Concatenate()([*wide, hidden]))
    return keras.Model(list(inputs.values()), out)


def build(data: Data, dim: int) -> Any:
    has_lists = any(ids.shape[1] > 1 for ids in data.columns.values())
    return (wide_and_deep if has_lists else deep_fm)(data, dim)


def optimizer_of(args: argparse.Namespace, is_summed: bool = False) -> Any:
    of = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad, "adam": keras.optimizers.Adam}
    if not is_summed:
        return of[args.optimizer](args.rate)

    def summed(gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if gradient.shape[0] > args.dense_size else gradient

    class Summed(of[args.optimizer]):  # type: ignore[misc]
        def apply(self, grads: list[Any], trainable_variables: Any = None) -> Any:
            return super().apply([summed(one) for one in grads], trainable_variables)

    return Summed(args.rate)


def train(data: Data, seed: int, way: str, args: argparse.Namespace) -> float:
    """The AUC on the test part of a model that was trained this way."""
    keras.utils.set_random_seed(seed)  # so that models of all ways, on all workers, begin alike
    model = build(data, args.dim)
    optimizer = optimizer_of(args, way == SUMMED)
    workers = 1
    if way == CONVERTED:
        model = sok.distributed_model(model, sparse_as_dense_size=args.dense_size)
        optimizer, workers = sok.DistributedOptimizer(optimizer), sok.size()
    model.compile(optimizer, "binary_crossentropy")
    rng, samples = np.random.default_rng(seed), np.flatnonzero(~data.is_test)
    whole = len(samples) - len(samples) % args.batch
    order = np.concatenate([rng.permutation(samples)[:whole] for _ in range(args.epochs)])
    if workers > 1:
        order = order.reshape(-1, workers, args.batch // workers)[:, sok.rank()].ravel()
    columns = [*data.columns.values(), *([data.numbers] if data.numbers.shape[1] else [])]
    given = [column[order] for column in columns]
    model.fit(given, data.labels[order], batch_size=args.batch // workers, shuffle=False, verbose=0)
    test = [column[data.is_test] for column in columns]
    return auc(data.labels[data.is_test], model.predict(test, batch_size=4096, verbose=0))


def measure(data: Data, args: argparse.Namespace) -> list[str]:
    """A line of a table for each way."""
    seeds = range(args.seeds)
    found = {CONVERTED: np.array([train(data, seed, CONVERTED, args) for seed in seeds])}
    stock = [STOCK] + [SUMMED] * (args.optimizer != "sgd" and KERAS == "keras")
    for i, way in enumerate(stock):  # workers share these
        mine = [train(data, s, way, args) if (s + i) % sok.size() == sok.rank() else 0.0 for s in seeds]
        all_of_them = get_transport().all_gather(tf.constant([mine], tf.float64), f"conversion/{i}")
        found[way] = all_of_them.numpy().sum(axis=0)
    lines = []
    for way, aucs in found.items():
        cells = [data.name, way, f"{aucs.mean():.4f} ({aucs.min():.4f} to {aucs.max():.4f})"]
        cells.append("" if way == CONVERTED else " ".join(f"{one:+.5f}" for one in found[CONVERTED] - aucs))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="a folder of data sets: benchmarks/real_data.py has their names")
    parser.add_argument("--only", nargs="+", help="names of data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", choices=["sgd", "adagrad", "adam"], default="adam")
    parser.add_argument("--rate", type=float, default=0.002)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="of all workers together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dense-size", type=int, default=64, help="sparse_as_dense_size")
    args = parser.parse_args(arguments)
    sok.Init(seed=1)

    def tell(line: str) -> None:
        if sok.rank() == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    about = describe()
    tell(f"{about['cpu']}, {about['usable_cores']} cores, converted: {sok.size()} workers, {KERAS}")
    tell(f"{args.optimizer}, rate {args.rate}, batch {args.batch}, {args.epochs} epochs, {args.seeds} seeds")
    header = "| data | way | AUC, mean (least to most) | converted less this, seed by seed |\n|---|---|---|---|"
    for data in read(args.data):
        if args.only and data.name not in args.only:
            continue
        tests, rows = int(data.is_test.sum()), list(data.rows.values())
        sizes = f"{data.labels.size - tests:,} samples to train with, {tests:,} to test, {len(rows)} columns"
        tell(f"\n{data.name}: {sizes} of {sum(rows):,} ids, {sum(n > args.dense_size for n in rows)} of them tables\n")
        begin = time.perf_counter()
        tell("\n".join([header, *measure(data, args)]))
        tell(f"\n{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
