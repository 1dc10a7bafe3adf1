"""horovodrun -np 2 python -m benchmarks.staleness FOLDER: what stale rows do to a model's AUC.

FOLDER holds real samples (benchmarks/real_data.py says which names it knows). Each is trained by `sok.ahead` with exact
rows, and with rows that are up to k steps old. The order of the training part and all initial values depend on a seed;
with one seed the runs differ by the age of rows alone. Printed is the area under the curve of the test part: for exact
rows its mean over seeds and their standard deviation, for each k the mean difference to the exact run of the same seed,
its standard deviation, and the mean age of the rows in updates. docs/pipelines.md has figures.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import sok
from benchmarks.machine import describe
from benchmarks.real_data import Data, read
from examples.criteo.metrics import auc
from sok.job.context import get_transport

DIM = 8


class Model:
    """A table for each column, pooled, and a dense part."""

    def __init__(self, data: Data, seed: int) -> None:
        self._columns = list(data.columns)
        # One more table, whose only row grows by one with each update, says how old rows are.
        self._clock = sok.EmbeddingVariable(2, 2, name=f"{data.name}_clock", initializer="zeros")
        self._tables = [
            sok.EmbeddingVariable(DIM, rows, name=f"{data.name}_{name}", seed=seed, initializer="uniform")
            for name, rows in data.rows.items()
        ]
        sizes = ((64, "relu"), (32, "relu"), (1, None))
        initializers = [tf.keras.initializers.GlorotUniform(seed=10 * seed + i) for i in range(len(sizes))]
        self._dense = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(n, activation, kernel_initializer=initializer)
                for (n, activation), initializer in zip(sizes, initializers, strict=True)
            ]
        )
        self._dense.build([None, DIM * len(self._tables) + data.numbers.shape[1]])
        self._of_rows, self._of_clock = sok.optimizers.Adagrad(0.05), sok.optimizers.SGD(1.0)
        self._of_rest = tf.keras.optimizers.Adam(0.003)
        self._of_rest.build(self._dense.trainable_variables)
        self.step, self.predict = tf.function(self._step), tf.function(self._predict)

    def look_up(self, batch: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        ids = [batch[name] for name in self._columns]
        now = tf.zeros([1, 1], tf.int64)
        return sok.group_embedding_lookup_sparse([self._clock, *self._tables], [now, *ids], combiners="mean")

    def _step(self, batch: dict[str, tf.Tensor], ticket: sok.Ticket) -> tf.Tensor:
        """Gives the number of updates that the rows of this batch had seen."""
        rest = self._dense.trainable_variables
        with tf.GradientTape() as tape:
            with ticket:
                clock, *vectors = self.look_up(batch)
            logits = self._logits(vectors, batch)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["labels"], logits=logits)
            loss = (tf.reduce_mean(losses) - tf.reduce_sum(clock) + tf.stop_gradient(tf.reduce_sum(clock))) / sok.size()
        tape = sok.DistributedGradientTape(tape, op=sok.Sum)
        of_clock, of_rows, of_rest = tape.gradient(loss, [[self._clock], self._tables, rest])
        self._of_clock.apply_gradients(zip(of_clock, [self._clock], strict=True))
        self._of_rows.apply_gradients(zip(of_rows, self._tables, strict=True))
        self._of_rest.apply_gradients(zip(of_rest, rest, strict=True))
        return clock[0, 0]

    def _predict(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.sigmoid(self._logits(self.look_up(batch)[1:], batch))

    def _logits(self, vectors: list[tf.Tensor], batch: dict[str, tf.Tensor]) -> tf.Tensor:
        return self._dense(tf.concat([*vectors, batch["numbers"]], 1))[:, 0]


def batches(data: Data, rows: np.ndarray, size: int) -> list[dict[str, tf.Tensor]]:
    """This worker's part of batches of `size` samples; what is left over at the end is left out."""
    mine = size // sok.size()
    found = []
    for begin in range(0, len(rows) - size + 1, size):
        part = rows[begin + sok.rank() * mine : begin + (sok.rank() + 1) * mine]
        batch = {name: tf.constant(ids[part]) for name, ids in data.columns.items()}
        found.append({**batch, "numbers": tf.constant(data.numbers[part]), "labels": tf.constant(data.labels[part])})
    return found


def run(data: Data, seed: int, stale: int, options: argparse.Namespace) -> tuple[float, float]:
    """Gives the AUC of the test part, and the mean age of rows in steps."""
    sok.shutdown()
    sok.Init(global_batch_size=options.batch_size, seed=seed)
    model, rng = Model(data, seed), np.random.default_rng(seed)
    train, test = np.flatnonzero(~data.is_test), np.flatnonzero(data.is_test)
    order = np.concatenate([rng.permutation(train) for _ in range(options.epochs)])
    ages = []
    pipeline = sok.ahead(batches(data, order, options.batch_size), model.look_up, depth=stale or 1, stale=stale or None)
    for step, (batch, ticket) in enumerate(pipeline):
        ages.append(step - float(model.step(batch, ticket)))
    scores, labels = [], []
    for batch in batches(data, test, options.batch_size):
        scores.append(model.predict(batch))
        labels.append(batch["labels"])
    gather = get_transport().all_gather
    all_labels = gather(tf.concat(labels, 0), "staleness/labels").numpy()
    return auc(all_labels, gather(tf.concat(scores, 0), "staleness/scores").numpy()), float(np.mean(ages))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the samples")
    parser.add_argument("--only", help="the data set of this name alone")
    parser.add_argument("--stale", type=int, nargs="+", default=[1, 2, 4, 8], help="how many steps old rows may be")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together")
    options = parser.parse_args(arguments)
    sok.Init()
    say = print if sok.rank() == 0 else (lambda *_, **__: None)
    say(f"{describe()}; {sok.size()} workers, batches of {options.batch_size}, {options.epochs} epochs, "
        f"{options.seeds} seeds")  # fmt: skip
    say("| data | exact |" + "".join(f" at most {k} old (mean age) |" for k in options.stale))
    say("|---|---|" + "---|" * len(options.stale))
    for data in read(options.folder):
        if options.only not in (None, data.name):
            continue
        exact = np.array([run(data, seed, 0, options)[0] for seed in range(options.seeds)])
        line = f"| {data.name} | {exact.mean():.4f} +- {exact.std():.4f} |"
        for stale in options.stale:
            found = np.array([run(data, seed, stale, options) for seed in range(options.seeds)])
            changes = found[:, 0] - exact
            line += f" {changes.mean():+.4f} +- {changes.std():.4f} ({found[:, 1].mean():.1f}) |"
        say(line, flush=True)
    sok.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
