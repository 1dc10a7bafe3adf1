"""The training loop: a model and its baseline, the steps that all workers take together, and the measurements."""

from __future__ import annotations

import argparse
import dataclasses
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


PASSES = (1, 2, 4)
"""Passes over a small log that are tried."""
SMALL = 100_000
"""Training rows up to which passes are tried: of a larger log one pass is enough, and many cost much."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How often everything learns from the training part."""

    baseline: int
    """Passes of the logistic regressions."""
    model: int
    """Passes of the model."""
    rest: int
    """Passes, the last of them, in which learns what the model adds to a linear part."""
    linear_l2: float
    """Strength of regularization of that part."""


class Falling(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that falls to a fiftieth from step `first` to step `last`, and is 0 before and after.

    At the end, steps as large as at first would leave the last batch's click rate in all weights alike.
    """

    def __init__(self, rate: float, first: int, last: int):
        super().__init__()
        self._rate, self._first, self._last = rate, first, last

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        rate = self._rate * (1.0 - 0.98 * (step - self._first) / (self._last - self._first))
        return tf.where((step >= self._first) & (step < self._last), rate, 0.0)

    def get_config(self) -> dict[str, float]:
        return {"rate": self._rate, "first": self._first, "last": self._last}


class Trainer:
    """A model and its baseline with their optimizers, and the two steps that all workers take together.

    A model's linear part is one more logistic regression, which learns by the same rule. `has_model` False: the
    baseline learns alone.
    """

    def __init__(self, options: argparse.Namespace, features: Features, plan: Plan, has_model: bool = True):
        num_dense, num_sparse = features.num_dense, features.num_sparse
        backend = backends.Stock(options, features) if options.backend == "stock" else backends.Sok(options, num_sparse)
        baseline, model = LogisticRegressions(backend.embed, features.log_odds), None
        if has_model:
            model = models.MODELS[options.model](backend.embed, num_sparse, options.embedding_dim, options.seed)
            model.l2, model.linear_l2 = options.l2, plan.linear_l2
        both = [each for each in (model, baseline) if each is not None]
        for each in both:  # an empty batch is enough to make the weights
            each({"dense": tf.zeros([0, num_dense]), "keys": tf.zeros([0, num_sparse], tf.int64)}, training=False)
        sok.broadcast_variables([v for each in both for v in each.variables], root_rank=0)
        steps = features.log.num_batches("train", options.batch_size)  # of a pass

        def adagrad(passes):
            sums = FIRST_ROWS / options.batch_size**2
            return backend.optimizer(
                "adagrad", Falling(LEARNING_RATE, 0, passes * steps), initial_accumulator_value=sums
            )

        parts = [(adagrad(plan.baseline), baseline.trainable_variables)]
        if model is not None:
            linear = model.linear_variables()
            rest = [v for v in model.trainable_variables if not any(v is each for each in linear)]
            begin = plan.model - plan.rest if linear else 0
            rate = Falling(options.learning_rate, begin * steps, plan.model * steps)
            parts.append((backend.optimizer(options.optimizer, rate), rest))
            parts += [(adagrad(plan.model), linear)] if linear else []
        self._backend, self._model = backend, model
        inputs_spec = {
            "dense": tf.TensorSpec([None, num_dense], tf.float32),
            "keys": tf.TensorSpec([None, num_sparse], tf.int64),
        }
        labels_spec, number_spec = tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float32)

        @tf.function(input_signature=[inputs_spec, labels_spec, number_spec, number_spec, number_spec])
        def train_step(inputs, labels, global_rows, model_learns, scouts_learn):
            total = tf.zeros([])
            with tf.GradientTape() as tape:
                loss, scout_losses = baseline.losses_of_batch(inputs, labels, scouts_learn)
                if model is not None:
                    # What is learnt is how a row differs from the average of all: no weight has to learn that first.
                    logits = features.log_odds + model(inputs, training=True)
                    total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
                    loss += model_learns * tf.add_n([total, *model.losses])  # they have no weight in common
                # Each worker's share of the mean over the global batch: the optimizer adds the shares up, so uneven and
                # even empty parts count for what they are.
                loss /= global_rows
            gradients = iter(backend.prepare(tape.gradient(loss, [v for _, variables in parts for v in variables])))
            for optimizer, variables in parts:
                optimizer.apply_gradients([(next(gradients), v) for v in variables])
            return total, scout_losses

        @tf.function(input_signature=[inputs_spec])
        def predict_step(inputs):
            logits = features.log_odds + model(inputs, training=False)
            return tf.concat([logits[:, None], baseline(inputs, training=False)], axis=1)

        self._train_step, self._predict_step = train_step, predict_step

    def train(self, batch: Batch, scouts_learn: bool, model_learns: bool = True) -> tuple[float, np.ndarray]:
        """Take one step; return the summed losses of this worker's part: the model's, and those of the scouts."""
        numbers = np.float32(batch.global_rows), np.float32(model_learns), np.float32(scouts_learn)
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


def choose(options: argparse.Namespace, features: Features, is_shown: bool) -> Plan:
    """Return how often model and baseline learn from the training part. Collective.

    Of a small log the last eighth of the training part is left out, and log losses on it decide; the test part has no
    say in it. First passes and regularization of logistic regressions are tried, until more passes are no better. A
    model's linear part has the best of them. The rest of the model learns in the last pass, what a linear part cannot
    say, as rare values are soon learnt by heart; or all of the model in each of several passes, where that is better
    by more than one standard error: some hundred rows alone would choose at random.
    """
    if options.epochs or features.log.train_rows > SMALL:
        return Plan(options.epochs or 1, options.epochs or 1, 1, 0.0)
    progress = Progress("choosing passes", enabled=is_shown)
    regressions: list[np.ndarray] = []
    for epochs in PASSES:
        plan = Plan(epochs, epochs, 1, 0.0)
        regressions.append(_losses_left_out(options, features, plan, False, progress)[:, 1:].sum(axis=0))
        best, strength = np.unravel_index(np.argmin(regressions), [len(regressions), len(L2)])
        if best < len(regressions) - 1:
            break
    plan = Plan(PASSES[best], PASSES[best], 1, L2[strength])
    first = _losses_left_out(options, features, plan, True, progress)[:, 0]  # [batches]
    chosen, most, last = plan, 0.0, np.inf
    for epochs in PASSES:
        other = dataclasses.replace(plan, model=epochs, rest=epochs)
        if other == plan:
            continue
        losses = _losses_left_out(options, features, other, True, progress)[:, 0]
        gain = first - losses
        if gain.sum() > max(most, gain.std() * np.sqrt(gain.size)):
            chosen, most = other, gain.sum()
        if losses.sum() > last:
            break
        last = losses.sum()
    progress.close()
    return chosen


def _losses_left_out(
    options: argparse.Namespace, features: Features, plan: Plan, has_model: bool, progress: Progress
) -> np.ndarray:  # [batches, 1 + len(L2)]
    """Return the summed losses of model and scouts on what they do not learn from, in their last pass. Collective."""
    trainer, losses = Trainer(options, features, plan, has_model), []
    steps, epochs = features.log.num_batches("train", options.batch_size), plan.model if has_model else plan.baseline
    for number in range(epochs):
        for step, batch in enumerate(prefetch(features.batches("train", options.batch_size))):
            learns = _scouts_learn(step, steps)
            loss, scouts = trainer.train(batch, scouts_learn=learns, model_learns=learns)
            if number == epochs - 1 and not learns:
                losses.append([loss, *scouts])
            progress.update(number * steps + step + 1, epochs * steps)
    told = np.array(losses)
    return gather(told.reshape(1, -1), "criteo/left_out").sum(axis=0).reshape(told.shape)


def _scouts_learn(step: int, steps: int) -> bool:
    """Whether a step of a pass is not in the last eighth, which is left out."""
    return step < steps * 7 // 8


class Run:
    """One training run: the loop, the measurements, and what they came to.

    The logistic regressions' scouts do not learn from the last eighth of the batches of the training part. Their loss
    on these in the baseline's last pass says which strength of regularization the baseline has.
    """

    def __init__(self, options: argparse.Namespace, features: Features, plan: Plan, trainer: Trainer, is_shown: bool):
        self._options, self._features, self._plan, self._trainer = options, features, plan, trainer
        self._is_shown = is_shown
        self._curve_batches: list[Batch] | None = None
        self.history: list[dict[str, float | None]] = []
        self.steps = 0
        self.samples_per_second: float | None = None

    def train(self) -> dict[str, Any]:
        """Take all steps; return what they came to on the whole test part, as `--json` writes it. Collective."""
        options, train_rows = self._options, self._features.log.train_rows
        steps_per_epoch = self._features.log.num_batches("train", options.batch_size)
        epochs = max(self._plan.baseline, self._plan.model)
        total_steps = steps_per_epoch * epochs
        every = -(-total_steps // options.curve_points) if options.curve_points > 0 else total_steps
        progress = Progress("training", enabled=self._is_shown)
        scout_losses = np.zeros(len(L2))
        loss_sum = rows = interval_rows = interval_seconds = 0.0  # since the last point of the curve
        global_rows = timed_rows = 0
        seconds = 0.0
        for epoch in range(epochs):
            for number, batch in enumerate(prefetch(self._features.batches("train", options.batch_size))):
                begin = time.perf_counter()
                scouts_learn = _scouts_learn(number, steps_per_epoch)
                loss, losses = self._trainer.train(batch, scouts_learn)
                if self.steps > 0:  # the first step is mostly TensorFlow tracing the graph
                    interval_seconds += time.perf_counter() - begin
                    interval_rows += batch.global_rows
                if epoch == self._plan.baseline - 1 and not scouts_learn:
                    scout_losses += losses
                loss_sum += loss
                rows += batch.labels.size
                global_rows += batch.global_rows
                self.steps += 1
                progress.update(global_rows, train_rows * epochs, f"loss {loss_sum / max(rows, 1):.4f}")
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
            "passes": dataclasses.asdict(self._plan),
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
