#!/usr/bin/env python3
"""`MonitoredTrainingSession` with hooks: to stop, to print, and one of ours that makes the workers start alike.

python examples/monitored_session.py                       one worker
horovodrun -np 2 python examples/monitored_session.py      two workers, the same model
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow.compat.v1 as tf

import sok

FEATURES, DIM, BATCH, NUM_IDS = 4, 8, 128, 1000


def batches(seed: int = 0):
    """Yield ids and labels of this worker's share of each batch. An id likes its label or not, whatever the feature."""
    likes = np.random.default_rng(seed).normal(size=NUM_IDS)
    part = BATCH // sok.size()
    for step in range(10**9):
        random = np.random.default_rng((seed, step))
        ids = random.integers(0, NUM_IDS, [BATCH, FEATURES])
        labels = (likes[ids].sum(axis=1) > 0).astype(np.float32)
        mine = slice(sok.rank() * part, (sok.rank() + 1) * part)
        yield ids[mine] * 10**12, labels[mine]  # any number is an id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", help="where worker 0 keeps the dense weights; rows are not kept"
    )
    options = parser.parse_args()

    tf.disable_eager_execution()
    init = sok.Init(global_batch_size=BATCH, seed=0)
    ids = tf.placeholder(tf.int64, [None, FEATURES])
    labels = tf.placeholder(tf.float32, [None])
    layer = sok.DistributedEmbedding(
        combiner="sum", max_vocabulary_size_per_gpu=10_000, embedding_vec_size=DIM, slot_num=FEATURES, max_nnz=1
    )
    rows = tf.reshape(layer(ids, training=True), [-1, FEATURES * DIM])
    # Another start on each worker, as without a seed: the hook below gives all of them worker 0's.
    weight = tf.get_variable("weight", [FEATURES * DIM, 1], initializer=tf.glorot_uniform_initializer(seed=sok.rank()))
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=tf.matmul(rows, weight)[:, 0]))
    step = tf.train.get_or_create_global_step()
    train = sok.DistributedOptimizer(tf.train.AdamOptimizer(0.02)).minimize(loss, global_step=step)

    hooks = [sok.hooks.BroadcastVariablesHook(root_rank=0), tf.train.StopAtStepHook(last_step=options.steps)]
    if sok.rank() == 0:
        hooks.append(tf.train.LoggingTensorHook({"step": step, "loss": loss}, every_n_iter=50))
    losses = []
    with tf.train.MonitoredTrainingSession(
        hooks=hooks, checkpoint_dir=options.checkpoint_dir if sok.rank() == 0 else None
    ) as session:
        session.run_step_fn(lambda step_context: step_context.session.run(init))  # without the hooks: this is no step
        for batch_ids, batch_labels in batches():
            if session.should_stop():
                break
            value, _ = session.run([loss, train], {ids: batch_ids, labels: batch_labels})
            losses.append(value)
    print(
        f"worker {sok.rank()} of {sok.size()}: loss {np.mean(losses[-20:]):.4f} after {len(losses)} steps", flush=True
    )


if __name__ == "__main__":
    main()
