"""Exact AUC, log loss and calibration in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the ROC curve: how often a clicked row scores above an unclicked one; ties count half.

    Args:
      labels: [n] 0 or 1.
      scores: [n] any numbers; only their order matters.

    Returns:
      A float in [0, 1], or NaN when only one class is present or a score is NaN.

    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8]))
    0.75
    """
    labels = np.asarray(labels).ravel() > 0.5
    scores = np.asarray(scores).ravel()
    positives = int(labels.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0 or np.isnan(scores).any():
        return float("nan")
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    count = np.diff(np.concatenate([first, [ordered.size]]))
    ranks = np.repeat(first + (count + 1) / 2.0, count)  # from 1; equal scores share their mean rank
    rank_sum = float(ranks[labels[order]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the mean negative log likelihood; probabilities are kept 1e-7 away from 0 and 1.

    >>> round(log_loss(np.array([1, 0]), np.array([0.5, 0.5])), 4)
    0.6931
    """
    p = np.clip(np.asarray(probabilities, dtype=np.float64).ravel(), 1e-7, 1 - 1e-7)
    y = np.asarray(labels, dtype=np.float64).ravel()
    if y.size == 0:
        return float("nan")
    return float(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p)))


def calibration(labels: np.ndarray, probabilities: np.ndarray, bins: int = 10) -> dict[str, Any]:
    """Return how predicted probabilities compare with what happened.

    Args:
      labels: [n] 0 or 1.
      probabilities: [n].
      bins: groups of as equal a size as can be, in the order of the predictions.

    Returns:
      "ratio": predicted over observed positives, None without any. "bins": for each that has rows "predicted" (mean
      probability), "observed" (share of positives) and "rows".

    >>> calibration(np.array([0, 1, 1, 1]), np.array([0.25, 0.25, 0.5, 1.0]), bins=2)["bins"][1]
    {'predicted': 0.75, 'observed': 1.0, 'rows': 2}
    """
    order = np.argsort(probabilities, kind="stable")
    p, y = np.asarray(probabilities, np.float64)[order], np.asarray(labels, np.float64)[order]
    parts = [(a, b) for a, b in zip(np.array_split(p, bins), np.array_split(y, bins), strict=True) if a.size]
    return {
        "ratio": float(p.sum() / y.sum()) if y.sum() else None,
        "bins": [{"predicted": float(a.mean()), "observed": float(b.mean()), "rows": a.size} for a, b in parts],
    }
