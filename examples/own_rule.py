#!/usr/bin/env python3
"""An update rule of one's own: Adagrad in three lines of Python, compiled by Numba, beside the built-in one.

python examples/own_rule.py                          trains with it
python examples/own_rule.py --check                  trains with both, and says how far apart and how fast they are
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import sok


@sok.optimizers.rule(
    slots={"accumulator": "initial_accumulator_value"},
    hyper=["learning_rate", "initial_accumulator_value", "epsilon"],
)
def adagrad(w, g, accumulator, learning_rate, initial_accumulator_value=0.1, epsilon=1e-7):
    """One row: the weights, their gradient and the slot, float32 [dim] each."""
    accumulator += g * g
    w -= learning_rate * g / np.sqrt(accumulator + epsilon)


def train(table: sok.EmbeddingVariable, optimizer: sok.optimizers.Optimizer, options: argparse.Namespace) -> float:
    """Seconds that the updates of all steps took. Each row learns to be all ones."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def gradient(keys):
        with tf.GradientTape() as tape:
            rows = sok.all2all_dense_embedding(table, keys)
            loss = tf.reduce_mean(tf.square(rows - 1.0))
        slices = tape.gradient(loss, table)
        return loss, slices.values, slices.indices

    rng = np.random.default_rng(sok.rank())
    seconds = 0.0
    for step in range(options.steps):
        keys = tf.constant(rng.zipf(1.2, options.batch_size).astype(np.int64) % options.rows)
        loss, values, row_ids = gradient(keys)
        begin = time.perf_counter()
        optimizer.apply_gradients([(tf.IndexedSlices(values, row_ids), table)])
        seconds += time.perf_counter() - begin if step else 0.0  # the first one compiles the rule
        if not options.check and sok.rank() == 0 and step % 10 == 0:
            print(f"step {step}, loss {float(loss):.4f}", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16384, help="of each worker")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--check", action="store_true", help="compare with the built-in rule; one line of JSON")
    options = parser.parse_args()

    sok.Init(seed=0)
    optimizers = {"own": adagrad(0.1)}
    if options.check:
        optimizers["built-in"] = sok.optimizers.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-7)
    tables = {
        which: sok.EmbeddingVariable(options.dim, options.rows, name=f"{which}_table", seed=1) for which in optimizers
    }
    seconds = {which: train(tables[which], optimizers[which], options) for which in optimizers}
    if options.check:
        (keys, own), (others, built_in) = (
            (part.numpy() for part in tables[which].export()) for which in ("own", "built-in")
        )
        own, built_in = own[np.argsort(keys)], built_in[np.argsort(others)]
        difference = tf.constant([np.max(np.abs(own - built_in), initial=0.0)])
        largest = float(np.max(sok.job.context.get_transport().all_gather(difference, "difference").numpy()))
        if sok.rank() == 0:
            ratio = seconds["own"] / seconds["built-in"]
            print(json.dumps({"max_difference": largest, "time_ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
