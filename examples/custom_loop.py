#!/usr/bin/env python3
"""A training loop of one's own: tf.function, a gradient tape, one optimizer for embedding rows and one for the rest.

python examples/custom_loop.py                       one worker
horovodrun -np 2 python examples/custom_loop.py      two workers, the same model
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import tensorflow as tf
from criteo.data import ClickLog, prefetch
from criteo.generate import cached_log, cached_path
from criteo.metrics import auc
from criteo.models import Dlrm

import sok
from sok.job.context import get_transport


def embed(dim: int, name: str) -> sok.DistributedEmbedding:
    return sok.DistributedEmbedding(
        combiner="sum", max_vocabulary_size_per_gpu=1 << 22, embedding_vec_size=dim, slot_num=26, max_nnz=1, name=name
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="FILE", help="Criteo's log; without it one is generated")
    parser.add_argument("--rows", type=int, default=100_000, help="rows to generate")
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers together")
    options = parser.parse_args()

    sok.Init(global_batch_size=options.batch_size, seed=0)
    if options.data is None and sok.local_rank() == 0:
        cached_log("out/criteo", options.rows, 0)
    get_transport().barrier("generated")
    log = ClickLog(options.data or str(cached_path("out/criteo", options.rows, 0)))

    model = Dlrm(embed, num_features=26, embedding_dim=16)
    model({"dense": tf.zeros([0, 13]), "keys": tf.zeros([0, 26], tf.int64)})  # makes the weights
    embedding_variables, other_variables = sok.split_embedding_variable_from_others(model.trainable_variables)
    sok.broadcast_variables(other_variables, root_rank=0)  # embedding rows need none: a row is a function of its key
    embedding_optimizer = sok.optimizers.Adam(learning_rate=0.002)
    dense_optimizer = tf.keras.optimizers.Adam(learning_rate=0.002)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 13], tf.float32),
            tf.TensorSpec([None, 26], tf.int64),
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([], tf.float32),
        ]
    )
    def train_step(dense, keys, labels, global_rows):
        with tf.GradientTape() as tape:
            logits = model({"dense": dense, "keys": keys}, training=True)
            total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
            loss = total / global_rows  # this worker's share of the global mean
        # With op=sok.Sum the shares add up, for rows and dense weights alike.
        tape = sok.DistributedGradientTape(tape, op=sok.Sum)
        embedding_gradients, dense_gradients = tape.gradient(loss, [embedding_variables, other_variables])
        embedding_optimizer.apply_gradients(zip(embedding_gradients, embedding_variables, strict=True))
        dense_optimizer.apply_gradients(zip(dense_gradients, other_variables, strict=True))
        return total

    @tf.function(input_signature=[tf.TensorSpec([None, 13], tf.float32), tf.TensorSpec([None, 26], tf.int64)])
    def predict(dense, keys):
        return model({"dense": dense, "keys": keys}, training=False)  # unseen keys read as fresh rows, none is stored

    steps = log.num_batches("train", options.batch_size)
    for step, batch in enumerate(prefetch(log.batches("train", options.batch_size, sok.rank(), sok.size())), 1):
        total = train_step(batch.dense, batch.keys, batch.labels, np.float32(batch.global_rows))
        if sok.rank() == 0 and (step % 20 == 0 or step == steps):
            print(f"step {step} of {steps}, loss {float(total) / max(batch.labels.size, 1):.4f}", flush=True)

    scores = [
        tf.stack([batch.labels, predict(batch.dense, batch.keys)], axis=1)
        for batch in log.batches("test", options.batch_size, sok.rank(), sok.size())
    ]
    scores = get_transport().all_gather(tf.concat(scores, axis=0), "scores").numpy()
    if sok.rank() == 0:
        print(f"AUC {auc(scores[:, 0], scores[:, 1]):.4f}; worker 0 holds {embedding_variables[0]}")


if __name__ == "__main__":
    main()
