"""The training loop: a model and its baseline, the steps that all workers take together, and the measurements."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from criteo import backends, metrics, models
from criteo.baseline import FIRST_ROWS, L2, LEARNING_RATE, LogisticRegressions
from criteo.data import Batch, prefetch
from criteo.features import Features
from sok.base.progress import Progress
from sok.job.context import get_transport

CURVE_ROWS = 20_000
"""Test rows that each point of the learning curve is measured on, but for the last, which has all of them."""


class Trainer:
    """A model and its baseline with their optimizers, and the two steps that all workers take together."""

    def __init__(self, options: argparse.Namespace, features: Features):
        num_dense, num_sparse = features.num_dense, features.num_sparse
        backend = backends.Stock(options, features) if options.backend == "stock" else backends.Sok(options, num_sparse)
        model = models.MODELS[options.model](backend.embed, num_sparse, options.embedding_dim, options.seed)
        model.l2 = options.l2
        baseline = LogisticRegressions(backend.embed, features.log_odds)
        for each in (model, baseline):  # an empty batch is enough to make the weights
            each({"dense": tf.zeros([0, num_dense]), "keys": tf.zeros([0, num_sparse], tf.int64)}, training=False)
        sok.broadcast_variables([*model.variables, *baseline.variables], root_rank=0)
        steps = options.epochs * features.log.num_batches("train", options.batch_size)

        def falling(rate):
            # At the end, steps as large as at first would leave the last batch's click rate in all weights alike.
            return tf.keras.optimizers.schedules.PolynomialDecay(rate, steps, end_learning_rate=0.02 * rate)

        optimizer = backend.optimizer(options.optimizer, falling(options.learning_rate))
        # Of the baseline and of the model's linear part.
        linear_optimizer = backend.optimizer(
            "adagrad", falling(LEARNING_RATE), initial_accumulator_value=FIRST_ROWS / options.batch_size**2
        )
        linear = model.linear_variables() + baseline.trainable_variables
        others = [v for v in model.trainable_variables if not any(v is each for each in linear)]
        self._backend, self._model = backend, model
        inputs_spec = {
            "dense": tf.TensorSpec([None, num_dense], tf.float32),
            "keys": tf.TensorSpec([None, num_sparse], tf.int64),
        }
        labels_spec, number_spec = tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float32)

        @tf.function(input_signature=[inputs_spec, labels_spec, number_spec, number_spec])
        def train_step(inputs, labels, global_rows, scouts_learn):
            with tf.GradientTape() as tape:
                # What is learnt is how a row differs from the average of all, so no weight has to learn that first.
                logits = features.log_odds + model(inputs, training=True)
                total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
                baseline_total, scout_losses = baseline.losses_of_batch(inputs, labels, scouts_learn)
                # Each worker's share of the mean over the global batch: the optimizer adds the shares up, so uneven and
                # even empty parts count for what they are. The two models have no weight in common.
                loss = (total + baseline_total + tf.add_n([tf.zeros([]), *model.losses])) / global_rows
            gradients = backend.prepare(tape.gradient(loss, others + linear))
            optimizer.apply_gradients(zip(gradients[: len(others)], others, strict=True))
            linear_optimizer.apply_gradients(zip(gradients[len(others) :], linear, strict=True))
            return total, scout_losses

        @tf.function(input_signature=[inputs_spec])
        def predict_step(inputs):
            logits = features.log_odds + model(inputs, training=False)
            return tf.concat([logits[:, None], baseline(inputs, training=False)], axis=1)

        self._train_step, self._predict_step = train_step, predict_step

    def train(self, batch: Batch, scouts_learn: bool) -> tuple[float, np.ndarray]:
        """Take one step; return the summed losses of this worker's part: the model's, and those of the scouts."""
        numbers = np.float32(batch.global_rows), np.float32(scouts_learn)
        total, scout_losses = self._train_step(_inputs(batch), batch.labels, *numbers)
        return float(total), scout_losses.numpy()

    def predict(self, batch: Batch) -> np.ndarray:
        """Return logits [b, 1 + 2 len(L2)]: the model's, then those of all logistic regressions."""
        return self._predict_step(_inputs(batch)).numpy()

    def rows_per_shard(self) -> list[int]:
        """Return the rows in use of the main table on each worker. Collective."""
        return self._backend.rows_per_shard(self._model)


def _inputs(batch: Batch) -> dict[str, np.ndarray]:
    return {"dense": batch.dense, "keys": batch.keys}


class Run:
    """One training run: the loop, the measurements, and what they came to.

    The logistic regressions' scouts do not learn from the last eighth of the batches of the training part. Their loss
    on these in the last epoch says which strength of regularization the baseline has.
    """

    def __init__(self, options: argparse.Namespace, features: Features, trainer: Trainer, is_shown: bool):
        self._options, self._features, self._trainer, self._is_shown = options, features, trainer, is_shown
        self._curve_batches: list[Batch] | None = None
        self.history: list[dict[str, float | None]] = []
        self.steps = 0
        self.samples_per_second: float | None = None

    def train(self) -> dict[str, Any]:
        """Take all steps; return what they came to on the whole test part, as `--json` writes it. Collective."""
        options, train_rows = self._options, self._features.log.train_rows
        steps_per_epoch = self._features.log.num_batches("train", options.batch_size)
        total_steps = steps_per_epoch * options.epochs
        every = -(-total_steps // options.curve_points) if options.curve_points > 0 else total_steps
        progress = Progress("training", enabled=self._is_shown)
        scout_losses = np.zeros(len(L2))
        loss_sum = rows = interval_rows = interval_seconds = 0.0  # since the last point of the curve
        global_rows = timed_rows = 0
        seconds = 0.0
        for epoch in range(options.epochs):
            for number, batch in enumerate(prefetch(self._features.batches("train", options.batch_size))):
                begin = time.perf_counter()
                scouts_learn = number < steps_per_epoch * 7 // 8
                loss, losses = self._trainer.train(batch, scouts_learn)
                if self.steps > 0:  # the first step is mostly TensorFlow tracing the graph
                    interval_seconds += time.perf_counter() - begin
                    interval_rows += batch.global_rows
                if epoch == options.epochs - 1 and not scouts_learn:
                    scout_losses += losses
                loss_sum += loss
                rows += batch.labels.size
                global_rows += batch.global_rows
                self.steps += 1
                progress.update(global_rows, train_rows * options.epochs, f"loss {loss_sum / max(rows, 1):.4f}")
                if self.steps % every == 0 or self.steps == total_steps:
                    seconds, timed_rows = seconds + interval_seconds, timed_rows + interval_rows
                    is_last = self.steps == total_steps
                    labels, logits = self._test_scores() if is_last else self._curve_scores()
                    self._add_point(loss_sum, rows, labels, logits[:, 0])
                    self.history[-1]["seconds"] = seconds
                    self.history[-1]["samples_per_second"] = _ratio(interval_rows, interval_seconds)
                    loss_sum = rows = interval_rows = interval_seconds = 0.0
        progress.close()
        self.samples_per_second = _ratio(timed_rows, seconds)
        return self._result(labels, logits, int(gather(scout_losses[None], "criteo/scouts").sum(axis=0).argmin()))

    def _curve_scores(self) -> tuple[np.ndarray, np.ndarray]:
        if self._curve_batches is None:
            self._curve_batches = list(self._features.batches("test", self._options.batch_size, CURVE_ROWS))
        return self._scores(self._curve_batches)

    def _test_scores(self) -> tuple[np.ndarray, np.ndarray]:
        return self._scores(prefetch(self._features.batches("test", self._options.batch_size)))

    def _scores(self, batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
        """Return labels [n] and logits [n, 1 + 2 len(L2)] of all workers. Collective."""
        parts = [np.empty([0, 2 + 2 * len(L2)])]
        parts += [np.concatenate([batch.labels[:, None], self._trainer.predict(batch)], axis=1) for batch in batches]
        gathered = gather(np.concatenate(parts), "criteo/scores")
        return gathered[:, 0], gathered[:, 1:]

    def _add_point(self, loss_sum: float, rows: float, labels: np.ndarray, logits: np.ndarray) -> None:
        sums = gather(np.array([[loss_sum, rows]]), "criteo/loss").sum(axis=0)
        self.history.append(
            {
                "step": self.steps,
                "train_loss": _finite(sums[0] / max(sums[1], 1.0)),
                "test_auc": _finite(metrics.auc(labels, logits)),
                "test_logloss": _finite(metrics.log_loss(labels, _sigmoid(logits))),
            }
        )

    def _result(self, labels: np.ndarray, logits: np.ndarray, strength: int) -> dict[str, Any]:
        baseline = logits[:, 1 + strength]
        return {
            "auc": self.history[-1]["test_auc"],
            "logloss": self.history[-1]["test_logloss"],
            "calibration": metrics.calibration(labels, _sigmoid(logits[:, 0])),
            "baseline_auc": _finite(metrics.auc(labels, baseline)),
            "baseline_logloss": _finite(metrics.log_loss(labels, _sigmoid(baseline))),
            "baseline_l2": L2[strength],
            "baseline_calibration": metrics.calibration(labels, _sigmoid(baseline)),
        }


def gather(rows: np.ndarray, name: str) -> np.ndarray:
    """Return the rows [n, k] of all workers, one worker after the other. Collective."""
    return get_transport().all_gather(tf.constant(rows, tf.float64), name).numpy()


def sum_over_workers(array: np.ndarray) -> np.ndarray:
    """Return the sum of an array of all workers. Collective."""
    return get_transport().grouped_all_reduce([tf.constant(array)], "criteo/sum", average=False)[0].numpy()


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x.astype(np.float64)))


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None


def _ratio(rows: float, seconds: float) -> float | None:
    return rows / seconds if seconds > 0 else None
