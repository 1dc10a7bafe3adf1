#!/usr/bin/env python3
"""Wide & Deep by feature columns, as a script for DeepRec has it: its names, a graph, and `MonitoredTrainingSession`.

python examples/deeprec_wdl.py                       one worker, generated data
horovodrun -np 2 python examples/deeprec_wdl.py      two workers, the same model
python examples/deeprec_wdl.py --data train.txt      Criteo's own log (or SOK_CRITEO_DATA=train.txt)
horovodrun -np 2 python examples/deeprec_wdl.py --capacity 2     lookups begin two steps before: the same losses

The deep part keeps its rows in tables that are spread over the workers; the wide part has ordinary variables, one
weight a category, that every worker holds whole. `group_embedding_column_scope` looks all of them up together:
--no-group-scope trains the same model one column at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow.compat.v1 as tf
from criteo.data import ClickLog
from criteo.formats import CRITEO
from criteo.generate import cached_log

import sok

CATEGORIES = CRITEO.columns[-CRITEO.num_sparse :]


def make_columns(dim: int, buckets: int, groups: bool) -> tuple[list, list]:
    """The columns of the wide part, and of the deep part."""
    scope = tf.feature_column.group_embedding_column_scope() if groups else contextlib.nullcontext()
    with scope:
        hashed = [tf.feature_column.categorical_column_with_hash_bucket(c, buckets, tf.int64) for c in CATEGORIES]
        deep = [sok.feature_column.embedding_column(c, dim) for c in hashed]
        wide = [tf.feature_column.embedding_column(c, 1, "sum", tf.zeros_initializer()) for c in hashed]
    return wide, [tf.feature_column.numeric_column("counts", [CRITEO.num_dense]), *deep]


def dense_layer(inputs: tf.Tensor, units: int, name: str, activation=tf.identity) -> tf.Tensor:
    kernel = tf.get_variable(
        f"{name}/kernel", [inputs.shape[-1], units], initializer=tf.glorot_uniform_initializer(seed=1)
    )
    return activation(
        tf.matmul(inputs, kernel) + tf.get_variable(f"{name}/bias", [units], initializer=tf.zeros_initializer())
    )


def model(features: dict, options: argparse.Namespace) -> tf.Tensor:  # [b] logits
    wide_columns, deep_columns = make_columns(options.embedding_dim, options.buckets, options.group_scope)
    with tf.variable_scope("wide"):
        wide = tf.reduce_sum(tf.feature_column.input_layer(features, wide_columns), axis=1)
    with tf.variable_scope("deep"):
        net = tf.feature_column.input_layer(features, deep_columns)
        for number, units in enumerate((64, 32)):
            net = dense_layer(net, units, f"hidden_{number}", tf.nn.relu)
        return wide + dense_layer(net, 1, "logits")[:, 0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Wide & Deep by feature columns, as a script for DeepRec has it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", default=os.environ.get("SOK_CRITEO_DATA"), help="a log; without it one is generated")
    parser.add_argument("--rows", type=int, default=20_000, help="rows to generate")
    parser.add_argument("--cache", default="out/criteo", help="where generated logs are kept")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a batch over all workers together")
    parser.add_argument("--steps", type=int, help="stop after so many; without it after one pass")
    parser.add_argument("--embedding-dim", type=int, default=8, help="length of a row of the deep part")
    parser.add_argument("--buckets", type=int, default=10_000, help="rows of each column")
    parser.add_argument("--no-group-scope", dest="group_scope", action="store_false", help="one column at a time")
    parser.add_argument("--capacity", type=int, default=0, help="how many steps before theirs lookups begin")
    parser.add_argument("--losses", metavar="FILE", help="write each worker's summed loss of each step to FILE.RANK")
    return parser.parse_args()


def batches_of(log: ClickLog, options: argparse.Namespace) -> Iterator[list]:
    batches = log.batches("train", options.batch_size, sok.rank(), sok.size())
    for batch in itertools.islice(batches, options.steps):
        yield [batch.dense, batch.keys, batch.labels, batch.global_rows]


def make_config(capacity: int) -> tf.ConfigProto:
    """Of a session whose lookups begin so many steps before theirs."""
    config = tf.ConfigProto()
    if capacity:
        config.graph_options.optimizer_options.do_async_embedding = True
        config.graph_options.optimizer_options.async_embedding_options.threads_num = 1
        config.graph_options.optimizer_options.async_embedding_options.capacity = capacity
    return config


def main() -> None:
    options = parse_arguments()
    tf.disable_eager_execution()
    sok.deeprec.install()
    tf.config.experimental.enable_distributed_strategy(strategy="collective")
    log = ClickLog(options.data or str(cached_log(options.cache, options.rows, seed=0)), holdout=0.1)

    places = [
        tf.placeholder(tf.float32, [None, CRITEO.num_dense]),
        tf.placeholder(tf.int64, [None, CRITEO.num_sparse]),
        tf.placeholder(tf.float32, [None]),
        tf.placeholder(tf.float32, []),
    ]
    # Read in a thread beside the session, which takes a batch for each step.
    counts, keys, labels, global_rows = tf.staged(
        places, capacity=2, items=places, feed_generator=batches_of(log, options)
    )
    features = {"counts": counts, **{name: keys[:, i : i + 1] for i, name in enumerate(CATEGORIES)}}
    total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=model(features, options)))
    step = tf.train.get_or_create_global_step()
    # Each worker's share of the mean over the global batch: the shares of all workers are added up.
    optimizer = sok.DistributedOptimizer(tf.train.AdagradOptimizer(0.05), op=sok.Sum)
    train = optimizer.minimize(total / global_rows, global_step=step)

    losses, rows, start = [], [], 0.0
    hooks = [tf.make_prefetch_hook(), sok.hooks.BroadcastVariablesHook(root_rank=0)]
    with tf.train.MonitoredTrainingSession(config=make_config(options.capacity), hooks=hooks) as session:
        while not session.should_stop():
            loss, labels_of_step, _ = session.run([total, labels, train])
            losses.append(float(loss))
            rows.append(len(labels_of_step))
            start = start or time.perf_counter()  # the first step also makes what the others find
    steps_per_second = (len(losses) - 1) / (time.perf_counter() - start) if len(losses) > 1 else 0.0
    if options.losses:
        with open(f"{options.losses}.{sok.rank()}", "w", encoding="utf-8") as file:
            json.dump(losses, file)
    quarter = max(len(losses) // 4, 1)
    first, last = (
        np.sum(losses[part]) / max(np.sum(rows[part]), 1) for part in (slice(quarter), slice(-quarter, None))
    )
    print(
        f"worker {sok.rank()} of {sok.size()}: loss {first:.4f} at first, {last:.4f} at last; "
        f"{len(losses)} steps, {steps_per_second:.1f} a second",
        flush=True,
    )


if __name__ == "__main__":
    main()
