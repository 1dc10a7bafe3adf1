#!/usr/bin/env python3
"""Predict who likes which movie: features with any number of ids, pooled into one vector each, under Keras' `fit`.

    python examples/movielens/train.py --data ml-100k
    horovodrun -np 2 python examples/movielens/train.py --data ml-100k

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
from criteo.metrics import auc

import sok
from movielens.ratings import NUM_GENRES, SINGLE_FEATURES, Ratings, load
from sok.job.context import get_transport

MAX_HISTORY = 20


class LikesModel(tf.keras.Model):
    """An MLP over the user, the movie, the movie's genres and the movies that the user liked before."""

    def __init__(self, dim: int):
        super().__init__()
        # One id each: nothing to pool.
        self.single = sok.DistributedEmbedding("sum", 100_000, dim, slot_num=len(SINGLE_FEATURES), max_nnz=1)
        # A movie has one to six genres; their sum says more than their mean.
        self.genres = sok.DistributedEmbedding("sum", NUM_GENRES, dim, slot_num=1, max_nnz=NUM_GENRES)
        # None to twenty movies; the mean does not depend on how many. No movie at all gives zeros.
        self.liked = sok.DistributedEmbedding("mean", 100_000, dim, slot_num=1, max_nnz=MAX_HISTORY)
        self.deep = tf.keras.Sequential([tf.keras.layers.Dense(width, "relu") for width in (64, 32)])
        self.logit = tf.keras.layers.Dense(1)
        self._width = dim * (len(SINGLE_FEATURES) + 2)

    def call(self, inputs, training=False):
        vectors = tf.concat(
            [
                self.single(inputs["singles"], training=training),  # [B, 5, D]
                self.genres(inputs["genres"], training=training),  # [B, 1, D]
                self.liked(inputs["history"], training=training),  # [B, 1, D]
            ],
            axis=1,
        )
        return self.logit(self.deep(tf.reshape(vectors, [-1, self._width])))  # [B, 1]


def inputs_of(ratings: Ratings) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    return {
        "singles": tf.constant(ratings.singles),
        "genres": tf.RaggedTensor.from_row_splits(ratings.genres, ratings.genre_splits),
        "history": tf.RaggedTensor.from_row_splits(ratings.history, ratings.history_splits),
    }


def batches(ratings: Ratings, batch_size: int, epoch_seed: int | None) -> Iterator[Ratings]:
    """Yield this worker's part of every global batch; in a random order that all workers share, if a seed is given."""
    order = (
        np.arange(len(ratings)) if epoch_seed is None else np.random.default_rng(epoch_seed).permutation(len(ratings))
    )
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        low, high = (rows.size * r // sok.size() for r in (sok.rank(), sok.rank() + 1))
        yield ratings.take(rows[low:high])


def dataset(ratings: Ratings, batch_size: int, epochs: int, seed: int) -> tf.data.Dataset:
    """Return this worker's (inputs, labels) batches of all epochs."""

    def generate():
        for epoch in range(epochs):
            for part in batches(ratings, batch_size, seed + epoch):
                yield inputs_of(part), part.labels[:, None]

    inputs = {
        "singles": tf.TensorSpec([None, len(SINGLE_FEATURES)], tf.int64),
        "genres": tf.RaggedTensorSpec([None, None], tf.int64),
        "history": tf.RaggedTensorSpec([None, None], tf.int64),
    }
    signature = (inputs, tf.TensorSpec([None, 1], tf.float32))
    return tf.data.Dataset.from_generator(generate, output_signature=signature).prefetch(4)


def test_auc(model: LikesModel, ratings: Ratings) -> float:
    """Return the exact AUC over the test parts of all workers. Collective."""
    scores = [
        tf.concat([part.labels[:, None], model(inputs_of(part), training=False)], axis=1)
        for part in batches(ratings, 4096, None)
    ]
    scores = get_transport().all_gather(tf.concat(scores, axis=0), "movielens/scores").numpy()
    return auc(scores[:, 0], scores[:, 1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Predict who likes which movie (a rating of 4 or 5) on MovieLens 100K.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", metavar="DIR", required=True, help="folder of u.data, u.item, u.user (plain or .gz)")
    parser.add_argument("--embedding-dim", type=int, default=16, help="length of an embedding row")
    parser.add_argument("--batch-size", type=int, default=512, help="rows of a batch over all workers together")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training part")
    parser.add_argument("--learning-rate", type=float, default=0.002, help="of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and of the order of the rows")
    parser.add_argument("--json", metavar="FILE", help="write the results as one JSON object")
    options = parser.parse_args(arguments)
    try:
        train, test = load(options.data, MAX_HISTORY)
    except (OSError, ValueError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 1

    sok.Init(global_batch_size=options.batch_size, seed=options.seed)
    tf.keras.utils.set_random_seed(options.seed)
    model = LikesModel(options.embedding_dim)
    model(inputs_of(train.take(np.arange(0))), training=False)  # an empty batch is enough to make the weights
    model.compile(
        optimizer=sok.DistributedOptimizer(tf.keras.optimizers.Adam(options.learning_rate)),
        loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )
    history = model.fit(
        dataset(train, options.batch_size, options.epochs, options.seed),
        epochs=options.epochs,
        shuffle=False,  # the dataset does it
        steps_per_epoch=-(-len(train) // options.batch_size),
        callbacks=[sok.callbacks.MetricAverageCallback()],
        verbose=2 if sok.rank() == 0 else 0,
    )
    result = {
        "auc": test_auc(model, test),
        "loss": float(history.history["loss"][-1]),
        "workers": sok.size(),
        "train_rows": len(train),
        "test_rows": len(test),
    }
    if sok.rank() == 0:
        print(f"AUC {result['auc']:.4f} on the last fifth of every user's ratings ({len(test):,} rows)")
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
