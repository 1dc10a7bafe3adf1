#!/usr/bin/env python3
"""What the files beside this one start: a small model under Keras' `fit`, saved in a folder that all hosts see.

python train.py FOLDER       one worker; the other files here start it on many
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import sok


def train(folder: str, epochs: int = 2) -> float:
    """Trains, goes on where a run before has ended, saves; the loss of the last epoch of all workers."""
    sok.Init(global_batch_size=64 * max(1, _workers()), seed=1)
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.3, size=(4096, 3)) % 1_000_000
    labels = (np.sin(ids).sum(axis=1) > 0).astype("float32")
    samples = tf.data.Dataset.from_tensor_slices((ids, labels[:, np.newaxis]))
    batches = sok.data.batches(samples)  # each worker its part of every batch

    rows = sok.DistributedEmbedding("sum", 100_000, 8, slot_num=3, max_nnz=1, name="columns")
    keys = tf.keras.Input([3], dtype="int64")
    hidden = tf.keras.layers.Dense(16, "relu")(tf.keras.layers.Flatten()(rows(keys)))
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(optimizer=sok.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), loss="binary_crossentropy")

    manager = sok.CheckpointManager(tf.train.Checkpoint(model=model), str(Path(folder) / "checkpoints"), max_to_keep=2)
    manager.restore_or_initialize()
    callbacks = [sok.callbacks.MetricSumCallback()]
    history = model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    manager.save()
    return history.history["loss"][-1]


def _workers() -> int:
    """How many there are, before `sok.Init`: under `srun --mpi=pmix` only Horovod can tell."""
    try:
        import horovod.tensorflow as hvd
    except ImportError:
        return 1
    hvd.init()
    return hvd.size()


if __name__ == "__main__":
    loss = train(sys.argv[1])
    if sok.rank() == 0:
        print(f"{sok.size()} workers: loss {loss:.4f}")
