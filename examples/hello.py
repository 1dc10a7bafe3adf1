#!/usr/bin/env python3
"""The smallest whole program: a sharded hashed embedding under Keras' `fit`.

python examples/hello.py                       one worker
horovodrun -np 2 python examples/hello.py      two workers, the rows spread over both
"""

import numpy as np
import tensorflow as tf

import sok

sok.Init(global_batch_size=256, seed=1)

rng = np.random.default_rng(0)
ids = rng.zipf(1.3, size=(8192, 3)) % 1_000_000  # three categories a sample, some values far more frequent than others
labels = (np.sin(ids).sum(axis=1) > 0).astype("float32")  # every value has an effect of its own, to be learnt
mine = slice(sok.rank(), None, sok.size())  # each worker takes its own part of the data

embedding = sok.DistributedEmbedding(
    combiner="sum", max_vocabulary_size_per_gpu=100_000, embedding_vec_size=8, slot_num=3, max_nnz=1
)
inputs = tf.keras.Input([3], dtype="int64")
hidden = tf.keras.layers.Dense(16, "relu")(tf.keras.layers.Flatten()(embedding(inputs)))
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, "sigmoid")(hidden))
model.compile(optimizer=sok.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), loss="binary_crossentropy")
history = model.fit(ids[mine], labels[mine], batch_size=256 // sok.size(), epochs=3, verbose=0, shuffle=False)
print(f"worker {sok.rank()} of {sok.size()}: loss {history.history['loss'][-1]:.4f},", embedding.embedding_variable)
