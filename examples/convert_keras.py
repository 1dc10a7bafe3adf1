#!/usr/bin/env python3
"""A stock Keras model, trained; then converted by two lines, and trained again from the same values.

python examples/convert_keras.py --check                        one worker
horovodrun -np 2 python examples/convert_keras.py --check       two workers, the same model
TF_USE_LEGACY_KERAS=1 python examples/convert_keras.py --check  tf_keras

Prints one line of JSON: how far the predictions of the two lie apart, and the collectives of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import sok

keras = tf.keras
BATCH = 96


def deep_fm(fields: int, rows: int, dim: int) -> keras.Model:
    """Nothing of sok: an Embedding layer of vectors and one of numbers for each field."""
    inputs = [keras.Input((1,), dtype="int64", name=f"c{i}") for i in range(fields)]
    vectors = [keras.layers.Embedding(rows, dim, name=f"vector_{i.name}")(i) for i in inputs]
    numbers = [keras.layers.Embedding(rows, 1, name=f"number_{i.name}")(i) for i in inputs]
    x = keras.layers.Concatenate(axis=1)(vectors)
    mean = keras.layers.GlobalAveragePooling1D()(x)
    deep = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(x))
    parts = [keras.layers.Multiply()([mean, mean]), deep, *map(keras.layers.Flatten(), numbers)]
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(parts)))


def samples(fields: int, rows: int, steps: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.3, size=(fields, steps * BATCH, 1)) % rows
    return list(ids), (ids.sum(axis=0) % 3 == 0).astype("float32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=26, help="fields, with two Embedding layers each")
    parser.add_argument("--rows", type=int, default=1000, help="of each layer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="fail unless both models are one, by one exchange a step")
    options = parser.parse_args()

    sok.Init(global_batch_size=BATCH, seed=0)
    ids, labels = samples(options.layers, options.rows, options.steps)
    stock, model = (deep_fm(options.layers, options.rows, 8) for _ in range(2))
    sok.broadcast_variables(stock.variables)
    model.set_weights(stock.get_weights())

    stock.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    stock.fit(ids, labels, batch_size=BATCH, shuffle=False, verbose=0)

    model = sok.distributed_model(model)  # changed
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "binary_crossentropy")  # changed
    # Each worker gets its part of each batch.
    part = np.arange(options.steps * BATCH).reshape(options.steps, sok.size(), -1)[:, sok.rank()].ravel()
    with sok.trace() as counted:
        model.fit(
            [column[part] for column in ids], labels[part], batch_size=BATCH // sok.size(), shuffle=False, verbose=0
        )

    expected, found = (m.predict(ids, batch_size=BATCH, verbose=0) for m in (stock, model))
    in_each_step = [one["collectives"] for one in counted.by_name.values() if one["collectives"] >= options.steps]
    result = {
        "max_difference": float(np.abs(found - expected).max()),
        "collectives_per_step": sum(in_each_step) / options.steps,
        "changed_lines": Path(__file__).read_text().count("  # " + "changed\n"),
        "layers": 2 * options.layers,
        "steps": options.steps,
        "workers": sok.size(),
        "keras": keras.layers.Layer.__module__.partition(".")[0],
    }
    if sok.rank() == 0:
        sys.stdout.write(json.dumps(result) + "\n")
    is_right = result["max_difference"] < 1e-5 and result["collectives_per_step"] == (4 if sok.size() > 1 else 0)
    return int(options.check and not is_right)


if __name__ == "__main__":
    sys.exit(main())
