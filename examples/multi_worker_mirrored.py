"""Workers that meet by TF_CONFIG and train under MultiWorkerMirroredStrategy, without Horovod.

    python examples/multi_worker_mirrored.py --check

starts two workers on this host. On a cluster each process is started with its own TF_CONFIG, as for any program of
`tf.distribute`, and runs `train`. Ends with one line of JSON; with --check also compares with one worker that has all
samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

BATCH, STEPS, COLUMNS, KEYS = 64, 30, 8, 500  # BATCH: of all workers together


def train(result: Path) -> None:
    """What every worker runs."""
    import tensorflow as tf
    import tf_keras

    import sok

    several = "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    sok.Init(global_batch_size=BATCH, seed=1)  # after the strategy, before the first layer

    tf_keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = sok.layers.for_keras(tf_keras)
        keys = tf_keras.Input([COLUMNS], dtype="int64")
        rows = layers.DistributedEmbedding("sum", KEYS * COLUMNS, 8, COLUMNS, max_nnz=1, name="columns")
        hidden = tf_keras.layers.Dense(16, activation="relu")(tf_keras.layers.Flatten()(rows(keys)))
        model = tf_keras.Model(keys, tf_keras.layers.Dense(1, activation="sigmoid")(hidden))
        model.compile(sok.DistributedOptimizer(tf_keras.optimizers.Adam(0.01)), "binary_crossentropy")

    # All workers name the same samples, in batches of all workers: TensorFlow gives each its part of each batch.
    dataset = tf.data.Dataset.from_tensor_slices(samples()).batch(BATCH)
    losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]

    found = rows.embedding_variable.sparse_read(tf.range(KEYS, dtype=tf.int64)).numpy()
    if sok.rank() == 0:
        kernel = model.trainable_variables[-2].numpy()
        answer = {"workers": sok.size(), "losses": losses}
        result.write_text(json.dumps({**answer, "rows": found.tolist(), "kernel": kernel.tolist()}))


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Keys [STEPS * BATCH, COLUMNS], of each column its own, and labels [STEPS * BATCH, 1]."""
    rng = np.random.default_rng(0)
    values = rng.zipf(1.3, (STEPS * BATCH, COLUMNS)) % KEYS
    taste = rng.normal(size=(COLUMNS, KEYS))
    liked = taste[np.arange(COLUMNS), values].sum(1)
    labels = rng.random(STEPS * BATCH) < 1 / (1 + np.exp(-liked))
    return values + np.arange(COLUMNS) * KEYS, labels[:, np.newaxis].astype(np.float32)


def run(workers: int, folder: Path) -> dict[str, object]:
    """Starts the workers, as a cluster would, and gives what worker 0 has written."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for one in sockets:
            one.bind(("localhost", 0))
        addresses = [f"localhost:{one.getsockname()[1]}" for one in sockets]
    result, processes = folder / f"{workers}.json", list[subprocess.Popen[bytes]]()
    for index in range(workers):
        environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
        if workers > 1:
            task = {"type": "worker", "index": index}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        command = [sys.executable, __file__, "--worker", str(result)]
        processes.append(subprocess.Popen(command, env=environment))
    if any([process.wait(600) for process in processes]):
        raise SystemExit("A worker has failed.")
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="compare with one worker that has all samples")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.workers, Path(folder))
        line = {what: found[what] for what in ("workers", "losses")}
        if options.check:
            one = run(1, Path(folder))
            differences = [np.abs(np.subtract(found[what], one[what])).max() for what in ("rows", "kernel", "losses")]
            line["difference"] = float(max(differences))
            assert line["difference"] < 1e-5, line
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
