#!/usr/bin/env python3
"""The same training in a tf.compat.v1 session: placeholders, a graph, an init op, `session.run`.

python examples/session_v1.py                       one worker
horovodrun -np 2 python examples/session_v1.py      two workers, the same model
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import tensorflow.compat.v1 as tf
from criteo.data import ClickLog, prefetch
from criteo.generate import cached_log, cached_path
from criteo.metrics import auc

import sok
from sok.job.context import get_transport

DIM = 16


def dense_layer(x: tf.Tensor, units: int, name: str, activation=None) -> tf.Tensor:
    with tf.variable_scope(name):
        # The same seed on all workers, so that they start alike; `sok.hooks` can broadcast instead.
        kernel = tf.get_variable("kernel", [x.shape[-1], units], initializer=tf.glorot_uniform_initializer(seed=1))
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
    y = tf.matmul(x, kernel) + bias
    return y if activation is None else activation(y)


def logits_of(dense: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return logits [B] of dense features [B, 13] and embedding rows [B, 26, DIM]."""
    deep = tf.concat([dense, tf.reshape(rows, [-1, 26 * DIM])], axis=1)
    deep = dense_layer(deep, 128, "deep_0", tf.nn.relu)
    deep = dense_layer(deep, 64, "deep_1", tf.nn.relu)
    return dense_layer(deep, 1, "logit")[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="FILE", help="Criteo's log; without it one is generated")
    parser.add_argument("--rows", type=int, default=100_000, help="rows to generate")
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers together")
    options = parser.parse_args()

    tf.disable_eager_execution()
    init = sok.Init(global_batch_size=options.batch_size, seed=0)
    if options.data is None:  # each worker of a machine that comes too early writes it; the last rename wins
        cached_log("out/criteo", options.rows, 0)
    log = ClickLog(options.data or str(cached_path("out/criteo", options.rows, 0)))

    dense = tf.placeholder(tf.float32, [None, 13])
    keys = tf.placeholder(tf.int64, [None, 26])
    labels = tf.placeholder(tf.float32, [None])
    global_rows = tf.placeholder(tf.float32, [])
    embedding = sok.DistributedEmbedding(
        combiner="sum", max_vocabulary_size_per_gpu=1 << 22, embedding_vec_size=DIM, slot_num=26, max_nnz=1
    )
    with tf.variable_scope("model"):
        logits = logits_of(dense, embedding(keys, training=True))
    with tf.variable_scope("model", reuse=True):
        test_logits = logits_of(dense, embedding(keys, training=False))  # stores no unseen key
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
    loss = tf.reduce_sum(losses) / global_rows  # this worker's share of the global mean

    row_variables, dense_variables = sok.split_embedding_variable_from_others(tf.trainable_variables())
    row_gradients = tf.gradients(loss, row_variables)
    # The gradients of a row are added up over the workers on their way to its owner; the dense ones are added up here.
    dense_gradients = get_transport().grouped_all_reduce(
        tf.gradients(loss, dense_variables), "dense_gradients", average=False
    )
    train = tf.group(
        sok.optimizers.Adam(learning_rate=0.002).apply_gradients(zip(row_gradients, row_variables, strict=True)),
        tf.train.AdamOptimizer(0.002).apply_gradients(zip(dense_gradients, dense_variables, strict=True)),
    )
    mine = tf.placeholder(tf.float32, [None, 2])
    everyone = get_transport().all_gather(mine, "scores")

    steps = log.num_batches("train", options.batch_size)
    with tf.Session() as session:
        session.run(init)
        session.run(tf.global_variables_initializer())
        for step, batch in enumerate(prefetch(log.batches("train", options.batch_size, sok.rank(), sok.size())), 1):
            feeds = {dense: batch.dense, keys: batch.keys, labels: batch.labels, global_rows: batch.global_rows}
            share, _ = session.run([loss, train], feeds)
            if sok.rank() == 0 and (step % 20 == 0 or step == steps):
                print(f"step {step} of {steps}, loss {share * batch.global_rows / max(batch.labels.size, 1):.4f}")
        scores = []
        for batch in log.batches("test", options.batch_size, sok.rank(), sok.size()):
            predicted = session.run(test_logits, {dense: batch.dense, keys: batch.keys})
            scores.append(np.stack([batch.labels, predicted], axis=1))
        scores = session.run(everyone, {mine: np.concatenate(scores)})
        rows = session.run(embedding.embedding_variable.size())
    if sok.rank() == 0:
        print(f"AUC {auc(scores[:, 0], scores[:, 1]):.4f}; worker 0 holds {rows:,} embedding rows")


if __name__ == "__main__":
    main()
