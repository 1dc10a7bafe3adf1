#!/usr/bin/env python3
"""The same training in a tf.compat.v1 session: placeholders, a graph, an init op, `sess.run`.

python examples/session_v1.py                       one worker
horovodrun -np 2 python examples/session_v1.py      two workers, the same model
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tensorflow.compat.v1 as tf
from criteo.data import Batch

DIM = 16


def dense_layer(x, units: int, name: str, activation=None):
    with tf.variable_scope(name):
        initializer = tf.glorot_uniform_initializer(seed=1)
        kernel = tf.get_variable("kernel", [x.shape[-1], units], initializer=initializer)
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
    y = tf.matmul(x, kernel) + bias
    return y if activation is None else activation(y)


def build_model(dense, keys, embedding):
    rows = embedding(keys, training=True)  # [B, 26, DIM]
    deep = tf.concat([dense, tf.reshape(rows, [-1, 26 * DIM])], axis=1)
    deep = dense_layer(deep, 128, "deep_0", tf.nn.relu)
    deep = dense_layer(deep, 64, "deep_1", tf.nn.relu)
    return dense_layer(deep, 1, "logit")[:, 0]


def feed(placeholders: dict, batch: Batch) -> dict:
    return {
        placeholders["dense"]: batch.dense,
        placeholders["keys"]: batch.keys,
        placeholders["labels"]: batch.labels,
        placeholders["global_rows"]: batch.global_rows,
    }
