"""The benchmark of stale rows, on one worker: nothing travels there, so nothing is stale."""

import argparse

import numpy as np

from benchmarks import staleness
from benchmarks.real_data import Data


def test_one_worker_has_the_rows_of_now_whatever_it_allows():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, [120, 1])
    labels = (ids[:, 0] % 2).astype(np.float32)
    columns = {"item": ids, "list": rng.integers(0, 5, [120, 3])}
    data = Data("small", columns, np.zeros([120, 1], np.float32), labels, np.arange(120) >= 80)
    options = argparse.Namespace(batch_size=8, epochs=4)
    exact, stale = (staleness.run(data, 0, k, options) for k in (0, 3))
    assert exact == stale and exact[1] == 0.0 and exact[0] > 0.9
    assert [len(batch["labels"]) for batch in staleness.batches(data, np.arange(19), 8)] == [8, 8]
