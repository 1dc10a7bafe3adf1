"""The ways of benchmarks/one_hot.py."""

import sok
from benchmarks import one_hot


def test_every_way_trains():
    sok.Init(seed=1)
    for name, step in one_hot.ways(rows=50, batch=8).items():
        losses = [float(step(turn)) for turn in range(40)]
        assert sum(losses[-4:]) < sum(losses[:4]), name
