#!/usr/bin/env python3
"""Train a click model on Criteo's log with sharded hashed embeddings, on one worker or on many.

    python examples/criteo/train.py                              one worker, generated data
    horovodrun -np 2 python examples/criteo/train.py             two workers, the same model
    python examples/criteo/train.py --data train.txt --model deepfm

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from criteo import generate, metrics
from criteo.data import Batch, ClickLog, prefetch
from criteo.formats import FORMATS
from sok.base.progress import Progress

CURVE_ROWS = 20_000
"""Test rows that each point of the learning curve is measured on; the final figures are measured on all of them."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a click model on Criteo's log with sharded hashed embeddings.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Run on N workers: horovodrun -np N python examples/criteo/train.py ...",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="FILE", help="click log, plain or .gz; without it one is generated")
    data.add_argument("--format", choices=sorted(FORMATS), default="criteo", help="format of --data")
    data.add_argument("--holdout", type=_fraction, default=0.2, help="the last fraction of the file is the test set")
    data.add_argument("--skip-bad-lines", action="store_true", help="leave malformed lines out instead of stopping")
    data.add_argument("--rows", type=_positive, default=400_000, help="rows to generate")
    data.add_argument("--cache", metavar="DIR", default="out/criteo", help="where generated logs are kept")
    data.add_argument("--generate-only", action="store_true", help="generate the log, say where it is, and stop")
    model = parser.add_argument_group("model and training")
    model.add_argument("--model", choices=("dlrm", "deepfm", "widedeep"), default="dlrm", help="which model")
    model.add_argument("--embedding-dim", type=_positive, default=16, help="length of an embedding row")
    model.add_argument("--batch-size", type=_positive, default=1024, help="rows of a batch over all workers together")
    model.add_argument("--epochs", type=_positive, default=1, help="passes over the training part")
    model.add_argument("--optimizer", choices=("adam", "lazyadam", "adagrad", "sgd"), default="adam", help="which rule")
    model.add_argument("--learning-rate", type=float, default=0.001, help="for embeddings and dense weights")
    model.add_argument("--seed", type=_not_negative, default=0, help="of the generated log and of all initial values")
    model.add_argument(
        "--max-vocabulary-size-per-gpu", type=_positive, default=1 << 24, metavar="ROWS",
        help="most rows of a table on one worker (memory is taken as rows appear)",
    )  # fmt: skip
    model.add_argument(
        "--backend", choices=("sok", "stock"), default="sok",
        help="stock: the same model on a plain TensorFlow variable, one process, to compare with",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write the results as one JSON object")
    output.add_argument("--report", metavar="DIR", default="out/criteo/report", help="where to write report.html")
    output.add_argument("--curve-points", type=int, default=12, help="measurements for the learning curve; 0 = none")
    options = parser.parse_args(arguments)
    if options.data and options.generate_only:
        parser.error("--generate-only makes a log, and --data says that there is one: give one of them.")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative. Received: {text}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1. Received: {text}")
    return value


class Trainer:
    """A model with its optimizer, and the two steps that all workers take together."""

    def __init__(self, options: argparse.Namespace, log: ClickLog):
        import tensorflow as tf

        from criteo import backends, models

        num_dense, num_sparse = log.format.num_dense, log.format.num_sparse
        backend = backends.Stock(options, log) if options.backend == "stock" else backends.Sok(options, num_sparse)
        self._backend = backend
        self.model = models.MODELS[options.model](backend.embed, num_sparse, options.embedding_dim, options.seed)
        model = self.model
        # An empty batch is enough to make the weights.
        model({"dense": tf.zeros([0, num_dense]), "keys": tf.zeros([0, num_sparse], tf.int64)}, training=False)
        optimizer = backend.optimizer(model)
        dense_spec = tf.TensorSpec([None, num_dense], tf.float32)
        keys_spec = tf.TensorSpec([None, num_sparse], tf.int64)

        @tf.function(
            input_signature=[dense_spec, keys_spec, tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float32)]
        )
        def train_step(dense, keys, labels, global_rows):
            with tf.GradientTape() as tape:
                logits = model({"dense": dense, "keys": keys}, training=True)
                total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
                # Each worker's share of the mean over the global batch: the optimizer adds the shares up, so uneven and
                # even empty parts count for what they are.
                loss = total / global_rows
            gradients = backend.prepare(tape.gradient(loss, model.trainable_variables))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return total

        @tf.function(input_signature=[dense_spec, keys_spec])
        def predict_step(dense, keys):
            return model({"dense": dense, "keys": keys}, training=False)

        self._train_step, self._predict_step = train_step, predict_step

    def train(self, batch: Batch) -> float:
        """Take one step and return the summed loss of this worker's part of the batch."""
        return float(self._train_step(batch.dense, batch.keys, batch.labels, np.float32(batch.global_rows)))

    def predict(self, batch: Batch) -> np.ndarray:  # [b] logits
        return self._predict_step(batch.dense, batch.keys).numpy()

    def rows_per_shard(self) -> list[int]:
        """Return the rows in use of the main table on each worker. Collective."""
        return self._backend.rows_per_shard(self.model)


class Run:
    """One training run: the loop, the measurements, and what they came to."""

    def __init__(self, options: argparse.Namespace, log: ClickLog, trainer: Trainer, rank: int, world_size: int):
        self._options, self._log, self._trainer = options, log, trainer
        self._rank, self._world_size = rank, world_size
        self._curve_batches: list[Batch] | None = None
        self.history: list[dict[str, float | None]] = []
        self.steps = 0
        self.samples_per_second = 0.0

    def train(self) -> None:
        """Take all steps. Collective."""
        steps_per_epoch = self._log.num_batches("train", self._options.batch_size)
        total_steps = steps_per_epoch * self._options.epochs
        every = -(-total_steps // self._options.curve_points) if self._options.curve_points > 0 else 0
        progress = Progress("training", enabled=self._rank == 0)
        loss_sum = rows = 0.0  # since the last point of the curve, this worker
        global_rows = timed_rows = 0
        seconds = 0.0
        for _ in range(self._options.epochs):
            for batch in prefetch(self._batches("train")):
                begin = time.perf_counter()
                loss_sum += self._trainer.train(batch)
                if self.steps > 0:  # the first step is mostly TensorFlow tracing the graph
                    seconds += time.perf_counter() - begin
                    timed_rows += batch.global_rows
                rows += batch.labels.size
                global_rows += batch.global_rows
                self.steps += 1
                note = f"loss {loss_sum / max(rows, 1):.4f}"
                progress.update(global_rows, self._log.train_rows * self._options.epochs, note)
                if every and (self.steps % every == 0 or self.steps == total_steps):
                    self._measure(loss_sum, rows)
                    loss_sum = rows = 0.0
        progress.close()
        self.samples_per_second = timed_rows / seconds if seconds > 0 else float("nan")

    def _batches(self, part: str, limit: int | None = None):
        return self._log.batches(part, self._options.batch_size, self._rank, self._world_size, limit)

    def _measure(self, loss_sum: float, rows: float) -> None:
        if self._curve_batches is None:
            self._curve_batches = list(self._batches("test", CURVE_ROWS))
        labels, logits = self._scores(self._curve_batches)
        sums = _gather(np.array([[loss_sum, rows]]), "criteo/loss").sum(axis=0)
        self.history.append(
            {
                "step": self.steps,
                "train_loss": _finite(sums[0] / max(sums[1], 1.0)),
                "test_auc": _finite(metrics.auc(labels, logits)),
                "test_logloss": _finite(metrics.log_loss(labels, _sigmoid(logits))),
            }
        )

    def evaluate(self) -> tuple[float, float]:
        """Return the AUC and the log loss over the whole test set, exact over all workers. Collective."""
        progress = Progress("testing", enabled=self._rank == 0)
        labels, logits = self._scores(prefetch(self._batches("test")), progress)
        progress.close()
        return metrics.auc(labels, logits), metrics.log_loss(labels, _sigmoid(logits))

    def _scores(self, batches, progress: Progress | None = None) -> tuple[np.ndarray, np.ndarray]:
        pairs, done = [np.empty([0, 2])], 0
        for batch in batches:
            pairs.append(np.stack([batch.labels, self._trainer.predict(batch)], axis=1))
            done += batch.global_rows
            if progress:
                progress.update(done, self._log.test_rows)
        gathered = _gather(np.concatenate(pairs), "criteo/scores")
        return gathered[:, 0], gathered[:, 1]


def _gather(rows: np.ndarray, name: str) -> np.ndarray:
    """Return the rows [n, k] of all workers, one worker after the other. Collective."""
    import tensorflow as tf

    from sok.job.context import get_transport

    return get_transport().all_gather(tf.constant(rows, tf.float64), name).numpy()


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x.astype(np.float64)))


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None


def best_possible(log: ClickLog) -> tuple[float | None, float | None]:
    """Return AUC and log loss of the true click probabilities on the test set, if the log was generated."""
    path = generate.truth_path(log.path)
    if not path.exists():
        return None, None
    truth = np.load(path, mmap_mode="r")
    labels = np.concatenate([batch.labels for batch in log.batches("test", 65536)])
    if truth.size != log.rows or labels.size != log.test_rows:
        return None, None  # the log was edited after it was made
    probabilities = np.asarray(truth[log.train_rows :])
    return metrics.auc(labels, probabilities), metrics.log_loss(labels, probabilities)


def prepare_log(options: argparse.Namespace, rank: int, local_rank: int, barrier) -> ClickLog:
    """Generate the log if none is given, and count its lines."""
    path = options.data
    if path is None:
        path = str(generate.cached_path(options.cache, options.rows, options.seed))
        if local_rank == 0:  # one worker of each machine writes, the others wait
            progress = Progress("generating", enabled=rank == 0)
            generate.cached_log(options.cache, options.rows, options.seed, progress.update)
            progress.close()
        barrier()
    progress = Progress("counting lines", unit="bytes", enabled=rank == 0)
    log = ClickLog(path, FORMATS[options.format], options.holdout, options.skip_bad_lines, progress.update)
    progress.close()
    return log


def train(options: argparse.Namespace) -> dict[str, Any] | None:
    """Run everything; return the results on rank 0 and None elsewhere. Collective."""
    import tensorflow as tf

    import sok

    workers_here = int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
    if workers_here > 1:  # otherwise every worker of a machine starts as many threads as the machine has cores
        threads = max(1, len(os.sched_getaffinity(0)) // workers_here)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    sok.Init(seed=options.seed)
    rank, world_size = sok.rank(), sok.size()
    from sok.job.context import get_transport

    begin = time.perf_counter()
    log = prepare_log(options, rank, sok.local_rank(), lambda: get_transport().barrier("criteo/generated"))
    if rank == 0:
        print(f"{log.path}: {log.train_rows:,} rows to train on, {log.test_rows:,} to test on; {world_size} worker(s)")
    trainer = Trainer(options, log)
    run = Run(options, log, trainer, rank, world_size)
    run.train()
    auc, logloss = run.evaluate()
    rows_per_shard = trainer.rows_per_shard()
    skipped = int(_gather(np.array([[log.skipped_lines]], np.float64), "criteo/skipped").sum())
    if rank != 0:
        return None
    best_auc, best_logloss = best_possible(log)
    settings = {**vars(options), "data": str(log.path)}
    return {
        "auc": _finite(auc),
        "logloss": _finite(logloss),
        "best_auc": best_auc,
        "best_logloss": best_logloss,
        "samples_per_second": _finite(run.samples_per_second),
        "steps": run.steps,
        "workers": world_size,
        "rows": sum(rows_per_shard),
        "rows_per_shard": rows_per_shard,
        "train_rows": log.train_rows,
        "test_rows": log.test_rows,
        "skipped_lines": skipped,
        "seconds": time.perf_counter() - begin,
        "settings": settings,
        "history": run.history,
    }


def summary(result: dict[str, Any], files: dict[str, Path]) -> str:
    """Return the last words of a run, for people."""

    def number(key: str) -> str:
        return "-" if result[key] is None else f"{result[key]:.4f}"

    def beside_best(key: str) -> str:
        return number(key) + (f"   (best possible: {number('best_' + key)})" if result["best_auc"] else "")

    speed = f"{result['samples_per_second'] or 0:,.0f}"
    lines = [
        ("AUC", beside_best("auc")),
        ("log loss", beside_best("logloss")),
        ("samples/s", f"{speed}   on {result['workers']} worker(s), {result['steps']} steps"),
        ("rows per shard", "  ".join(f"{n:,}" for n in result["rows_per_shard"])),
        *((what, str(path)) for what, path in files.items()),
    ]
    if result["skipped_lines"]:
        lines.insert(4, ("bad lines skipped", f"{result['skipped_lines']:,}"))
    width = max(len(label) for label, _ in lines)
    return "\n".join(["", *(f"  {label.ljust(width)}  {text}" for label, text in lines), ""])


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.generate_only:
        progress = Progress("generating")
        path = generate.cached_log(options.cache, options.rows, options.seed, progress.update)
        progress.close()
        print(f"{path}\n{generate.truth_path(path)}")
        return 0
    import tensorflow as tf

    try:
        result = train(options)
    except (ValueError, OSError) as error:
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        return 1
    except tf.errors.ResourceExhaustedError as error:
        print(f"train.py: error: {error.message}\nGive --max-vocabulary-size-per-gpu a higher value.", file=sys.stderr)
        return 1
    except tf.errors.OpError as error:
        if "Horovod has been shut down" not in str(error):
            raise
        print("train.py: error: another worker stopped; its own message says why.", file=sys.stderr)
        return 1
    if result is None:
        return 0
    from criteo.report import write_report

    files = {"data": Path(result["settings"]["data"]), "report": Path(options.report) / "report.html"}
    write_report(files["report"], result, result["history"])
    if options.json:
        files["json"] = Path(options.json)
        files["json"].parent.mkdir(parents=True, exist_ok=True)
        files["json"].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(summary(result, files), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
