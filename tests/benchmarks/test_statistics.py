"""The arithmetic between single steps and a figure."""

import numpy as np
import pytest

from benchmarks.machine import CpuClock, load_of_others
from benchmarks.statistics import QUIET, Window, quantile, summarize, summarize_together


def windows(*milliseconds, others=0.0):
    return [Window((ms / 1e3,), others) for ms in milliseconds]


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_quantile_is_numpys(q):
    values = list(np.random.default_rng(3).random(11))
    assert quantile(values, q) == pytest.approx(np.quantile(values, q))


def test_quantile_of_nothing_raises():
    with pytest.raises(ValueError, match="must not be empty"):
        quantile([], 0.5)


def test_figure_is_the_median_over_windows_of_the_median_over_steps():
    figure = summarize([Window((0.001, 0.002, 0.9), 0.0), Window((0.004,), 0.0), Window((0.003, 0.005), 0.0)])
    assert figure.ms == pytest.approx(4.0)  # of 2, 4, 4
    assert figure.best_ms == pytest.approx(1.0)
    assert (figure.steps, figure.windows) == (6, 3)


def test_spread_is_the_distance_of_the_quartiles_over_the_median():
    figure = summarize(windows(1, 2, 3, 4, 5))
    assert (figure.low_ms, figure.high_ms) == (pytest.approx(2.0), pytest.approx(4.0))
    assert figure.spread == pytest.approx(2 / 3)


def test_no_steps_raise():
    with pytest.raises(ValueError, match="at least one step"):
        summarize([Window((), 0.0)])


def test_busy_windows_are_left_out_when_everyone_has_enough_quiet_ones():
    figures = summarize_together(
        {
            "sok": windows(1, 1, 1) + windows(50, 50, 50, 50, others=1.0),
            "tf": windows(7, 7, 7, 7),
        }
    )
    assert figures["sok"].ms == pytest.approx(1.0)
    assert figures["sok"].windows == 3


def test_all_windows_count_when_one_contestant_was_never_left_in_peace():
    # One's quiet time beside another's busy time would flatter the first.
    figures = summarize_together(
        {
            "sok": windows(1, 1, 1) + windows(9, 9, 9, 9, others=1.0),
            "tf": windows(7, 7, 7, 7, others=1.0),
        }
    )
    assert figures["sok"].ms == pytest.approx(9.0)
    assert figures["sok"].quiet_windows == 3
    assert figures["tf"].quiet_windows == 0


def test_load_of_others_is_what_the_contestant_did_not_use():
    before, after = CpuClock(100.0, 10.0), CpuClock(103.0, 12.0)
    assert load_of_others(before, after, own_seconds=2.0) == pytest.approx(0.5)
    assert load_of_others(before, after, own_seconds=4.0) == 0.0
    assert load_of_others(before, after, own_seconds=3.0) < QUIET
