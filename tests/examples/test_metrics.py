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


def test_calibration_compares_means_of_tenths():
    rng = np.random.default_rng(0)
    probabilities = rng.uniform(0.05, 0.5, 1003)
    labels = rng.uniform(size=1003) < probabilities
    found = metrics.calibration(labels, probabilities)
    assert found["ratio"] == pytest.approx(probabilities.sum() / labels.sum())
    pairs = sorted(zip(probabilities.tolist(), labels.tolist(), strict=True))
    first, last = pairs[:101], pairs[-100:]
    for group, part in ((found["bins"][0], first), (found["bins"][-1], last)):
        assert group["rows"] == len(part)
        assert group["predicted"] == pytest.approx(sum(p for p, _ in part) / len(part))
        assert group["observed"] == pytest.approx(sum(y for _, y in part) / len(part))
    assert sum(group["rows"] for group in found["bins"]) == 1003


def test_calibration_without_positives_or_with_few_rows():
    found = metrics.calibration([0, 0], np.array([0.1, 0.2]))
    assert found["ratio"] is None
    assert [group["predicted"] for group in found["bins"]] == [0.1, 0.2]
