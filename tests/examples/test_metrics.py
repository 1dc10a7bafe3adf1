"""AUC and log loss against their definitions."""

import math

import numpy as np
import pytest
from criteo import metrics


@pytest.mark.parametrize("distinct", [2, 7, 1000])
def test_auc_is_the_share_of_ordered_pairs(distinct):
    rng = np.random.default_rng(distinct)
    labels = rng.integers(0, 2, 200)
    scores = rng.integers(0, distinct, 200) + 0.3 * labels * (distinct > 2)
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    expected = (difference > 0).mean() + 0.5 * (difference == 0).mean()
    assert metrics.auc(labels, scores) == pytest.approx(expected, abs=1e-12)


def test_auc_of_known_cases():
    assert metrics.auc([0, 1], [0.1, 0.9]) == 1.0
    assert metrics.auc([0, 1], [0.9, 0.1]) == 0.0
    assert metrics.auc([0, 1, 0, 1], [5, 5, 5, 5]) == 0.5
    assert math.isnan(metrics.auc([1, 1], [0.1, 0.2]))
    assert math.isnan(metrics.auc([], []))
    assert math.isnan(metrics.auc([0, 1], [0.1, float("nan")]))


def test_log_loss_of_known_cases():
    assert metrics.log_loss([1, 0], [0.8, 0.4]) == pytest.approx(-(math.log(0.8) + math.log(0.6)) / 2)
    assert math.isfinite(metrics.log_loss([1], [0.0]))
    assert math.isnan(metrics.log_loss([], []))
