#!/usr/bin/env python3
"""Train, export, and predict where there is no `sok`.

python examples/export.py                       one worker
horovodrun -np 2 python examples/export.py      two workers: rank 0 writes the rows of both
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import sok

sok.Init(global_batch_size=256, seed=1)

ids = np.random.default_rng(0).zipf(1.3, size=(4096, 3)) % 1_000_000
labels = (np.sin(ids).sum(axis=1) > 0).astype("float32")
mine = slice(sok.rank(), None, sok.size())

inputs = tf.keras.Input([3], dtype="int64", name="ids")
rows = sok.DistributedEmbedding(
    combiner="sum", max_vocabulary_size_per_gpu=100_000, embedding_vec_size=8, slot_num=3, max_nnz=1
)(inputs)
hidden = tf.keras.layers.Dense(16, "relu")(tf.keras.layers.Flatten()(rows))
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, "sigmoid", name="click")(hidden))
model.compile(optimizer=sok.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), loss="binary_crossentropy")
model.fit(ids[mine], labels[mine], batch_size=256 // sok.size(), epochs=1, verbose=0, shuffle=False)

path = str(Path(tempfile.mkdtemp()) / "click" / "1")  # the last part is the version, for TensorFlow Serving
report = sok.export_saved_model(model, path)  # all workers call it; rank 0 writes
predicted = model.predict(ids[:3], verbose=0)[:, 0]  # a lookup: all workers

SERVER = """
import sys
sys.modules["sok"] = None  # cannot be imported
import tensorflow as tf
served = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
ids = tf.constant([int(i) for i in sys.argv[2:]], tf.int64)
print(*served(ids=tf.reshape(ids, [-1, 3]))["click"].numpy()[:, 0])
"""
if sok.rank() == 0:
    arguments = [path, *map(str, ids[:3].ravel())]
    done = subprocess.run([sys.executable, "-c", SERVER, *arguments], capture_output=True, text=True, check=True)
    served = np.array(done.stdout.split(), np.float32)
    print(report.tables[0])
    print("here", predicted, "there", served, "difference", np.abs(served - predicted).max())
