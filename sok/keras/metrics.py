"""Metrics over the samples of all workers: of Keras' metrics that count, and AUC.

model.compile(optimizer, "binary_crossentropy", metrics=[sok.metrics.AUC()])
model.fit(..., callbacks=[sok.callbacks.MetricSumCallback()])
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import KerasModel, TensorLike
from sok.job import context
from sok.job.agreement import check_equal, together

# Stock metrics that are a function of sums over samples, with all that derive from them: Mean has most of them.
_SUMS = (
    *("Mean", "Sum", "AUC", "Precision", "Recall", "FBetaScore", "IoU", "MeanIoU", "R2Score"),
    *("TruePositives", "TrueNegatives", "FalsePositives", "FalseNegatives"),
    *("SensitivityAtSpecificity", "SpecificityAtSensitivity", "PrecisionAtRecall", "RecallAtPrecision"),
)
_made: dict[type, types.SimpleNamespace] = {}


class _AUCMixin:
    """Area under the curve of all workers' samples: Keras' `AUC`, of which nobody forgets the other workers.

    Args:
        *args, **kwargs: those of `keras.metrics.AUC`. Its 200 `num_thresholds` are few for rare clicks: give 1,000.

    While batches come, `result()` is that of this worker's samples and communicates with nobody.
    `sok.callbacks.MetricSumCallback` adds up the bins of all workers before the logs of an epoch or of an evaluation
    are told: the value then is that of one worker on all samples. In a loop of your own,
    `sok.metrics.sum_over_workers` does. If neither was called when the metric is reset, on several workers, a warning
    says so.

    Example:
        >>> auc = AUC(num_thresholds=1000)
        >>> auc.update_state([0, 1, 1, 0], [0.1, 0.8, 0.3, 0.4])
        >>> float(auc.result())
        0.75
    """

    name: str

    def reset_state(self) -> None:
        if vars(self).pop("_is_summed", False) is False and context.size() > 1 and _has_counted(self):
            warnings.warn(
                f"Metric '{self.name}' is reset, and what it told was of this worker's samples alone. For those of "
                f"all {context.size()} workers give fit and evaluate callbacks=[sok.callbacks.MetricSumCallback()], or "
                "call sok.metrics.sum_over_workers(metrics) on all workers before result().",
                stacklevel=2,
            )
        super().reset_state()  # type: ignore[misc]


def for_keras(keras: types.ModuleType) -> types.SimpleNamespace:
    """Gives `AUC` as a class of `keras`: Keras 3, or an explicitly imported `tf_keras`.

    `sok.metrics.AUC` is that for `tf.keras`.

    Returns:
        A namespace with `AUC`, the same class in every call.

    Example:
        >>> import tf_keras
        >>> issubclass(for_keras(tf_keras).AUC, tf_keras.metrics.AUC)
        True
    """
    stock = keras.metrics.AUC
    if stock not in _made:
        body = {"__doc__": _AUCMixin.__doc__, "__module__": __name__}
        register = keras.utils.register_keras_serializable(package="sok")
        _made[stock] = types.SimpleNamespace(AUC=register(type("AUC", (_AUCMixin, stock), body)))
    return _made[stock]


def sum_over_workers(metrics: Sequence[Any]) -> None:
    """Adds up what metrics have counted on all workers; each worker then holds all. Call it once before a reset.

    Args:
        metrics: of Keras 3 or tf_keras: those that are functions of sums over samples, which are `Mean` (with all
            that derive from it, such as `BinaryAccuracy`), `Sum`, `AUC`, `Precision`, `Recall`, counts of positives
            and negatives, `FBetaScore`, `IoU`, `R2Score`; and any whose attribute `sums_over_workers` is True.

    Raises:
        TypeError: a metric is none of these.
        ValueError: workers have other metrics.

    Collective: two collectives, none on one worker. All workers raise alike.

    Example:
        >>> mean = tf.keras.metrics.Mean()
        >>> mean.update_state([1.0, 3.0])
        >>> sum_over_workers([mean])
        >>> float(mean.result())
        2.0
    """
    transport = context.get_transport()
    if transport.size == 1:
        for metric in metrics:
            _refuse_others(metric)
        return
    check_equal(
        together(transport, "sok/metrics/names", lambda: [_described(metric) for metric in metrics]),
        "The metrics to be summed",
    )
    variables = [variable for metric in metrics for variable in metric.variables]
    counts = [tf.reshape(tf.cast(tf.convert_to_tensor(variable), tf.float64), [-1]) for variable in variables]
    sums = transport.grouped_all_reduce([tf.concat([[0.0], *counts], 0)], "sok/metrics/sums", average=False)[0]
    parts = tf.split(sums[1:], [len(count) for count in counts])
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), tf.as_dtype(variable.dtype)))
    for metric in metrics:
        vars(metric)["_is_summed"] = True


def of_model(model: KerasModel) -> tuple[list[Any], list[str]]:
    """The metrics of a compiled model that `sum_over_workers` takes, and the names of the others."""
    metrics = list(_each(model.metrics))
    return [m for m in metrics if _is_sum(m)], [m.name for m in metrics if not _is_sum(m)]


def exact_auc(labels: TensorLike, predictions: TensorLike, sample_weight: TensorLike | None = None) -> float:
    """Area under the ROC curve of all workers' samples, without bins: equal predictions count half.

    Args:
        labels: [n] of 0 and 1, this worker's; n as each worker likes, also 0.
        predictions: [n] numbers. Only their order counts.
        sample_weight: [n] numbers, 0 or more; None: all weigh the same.

    Returns:
        The area, the same on all workers; NaN if all labels are equal.

    Raises:
        ValueError: shapes that differ, labels that are neither 0 nor 1, NaN among predictions, weights below 0.

    Collective: two collectives, none on one worker. All workers raise alike. Each worker gets all samples: 24 bytes
    each.

    Example:
        >>> exact_auc([0, 1, 1, 0], [0.1, 0.8, 0.4, 0.4])
        0.875

    Source: the statistic of Mann and Whitney (1947).
    """
    mine: list[np.ndarray] = []
    transport = context.get_transport()
    together(transport, "sok/metrics/auc", lambda: mine.append(_checked(labels, predictions, sample_weight)))
    samples = mine[0]
    if transport.size > 1:
        samples = transport.all_gather(tf.constant(samples), "sok/metrics/auc/samples").numpy()
    label, prediction, weight = samples.T
    values, places = np.unique(prediction, return_inverse=True)
    positive = np.bincount(places, weight * label, len(values))
    negative = np.bincount(places, weight * (1 - label), len(values))
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float(positive @ (below + negative / 2) / pairs) if pairs > 0 else float("nan")


def _checked(labels: TensorLike, predictions: TensorLike, sample_weight: TensorLike | None) -> np.ndarray:
    """Label, prediction and weight of each sample, [n, 3] float64."""
    label, prediction = np.asarray(labels, np.float64), np.asarray(predictions, np.float64)
    weight = np.ones_like(label) if sample_weight is None else np.asarray(sample_weight, np.float64)
    if not label.ndim == prediction.ndim == weight.ndim == 1 or not len(label) == len(prediction) == len(weight):
        raise ValueError(
            "`labels`, `predictions` and `sample_weight` must have one shape [n]. Received: "
            f"{label.shape}, {prediction.shape}, {weight.shape}."
        )
    if not np.isin(label, (0, 1)).all():
        raise ValueError(f"`labels` must be 0 or 1. Received: {label[~np.isin(label, (0, 1))][0]}.")
    if np.isnan(prediction).any():
        raise ValueError(f"`predictions` must have an order. Received: NaN at place {np.isnan(prediction).argmax()}.")
    if not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError("`sample_weight` must be finite and not negative.")
    return np.stack([label, prediction, weight], 1)


def _described(metric: Any) -> list[Any]:
    _refuse_others(metric)
    return [type(metric).__name__, metric.name, [list(variable.shape) for variable in metric.variables]]


def _refuse_others(metric: Any) -> None:
    if not _is_sum(metric):
        raise TypeError(
            f"Metric '{getattr(metric, 'name', metric)}' ({type(metric).__name__}) is not known to be a function of "
            "sums over samples. If it is, say so: metric.sums_over_workers = True."
        )


def _is_sum(metric: Any) -> bool:
    stock = [
        getattr(sys.modules[library].metrics, name)
        for library in ("keras", "tf_keras")
        if library in sys.modules
        for name in _SUMS
        if hasattr(sys.modules[library].metrics, name)
    ]
    return bool(getattr(metric, "sums_over_workers", isinstance(metric, tuple(stock))))


def _each(metrics: Sequence[Any]) -> Iterator[Any]:
    for metric in metrics:
        # Keras 3 has the metrics of `compile` in one.
        if type(metric).__name__ == "CompileMetrics":
            yield from _each(metric.metrics)
        else:
            yield metric


def _has_counted(metric: Any) -> bool:
    return any(bool(np.any(np.asarray(variable) != 0)) for variable in metric.variables)


AUC = for_keras(tf.keras).AUC
