"""The parts of benchmarks/serving.py that decide what is measured."""

import numpy as np

import sok
from benchmarks import serving


class Tables:
    def __init__(self, count):
        self.tables = [sok.EmbeddingVariable(2, 10_000, name="of_benchmark") for _ in range(count)]


def test_ids_are_those_of_the_features_tables_but_for_the_share_that_nobody_has_seen():
    for count in (1, serving.FEATURES):
        rng = np.random.default_rng(0)
        model = Tables(count)
        keys = serving.fill(model, 2600, rng)
        assert sum(int(table.size()) for table in model.tables) == 2600
        seen = serving.ids_of(keys, 50, 0.0, rng).numpy()
        assert seen.shape == (50, serving.FEATURES) and all(np.isin(seen[:, f], keys[f]).all() for f in range(26))
        mixed = serving.ids_of(keys, 500, 0.25, rng).numpy()
        assert 0.2 < 1 - np.isin(mixed, keys).mean() < 0.3


def test_calls_take_turns():
    order = []
    times = serving.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0)
    assert order == ["a"] * 5 + ["b"] * 5 + ["a", "b"] * 20
    assert {name: len(t) for name, t in times.items()} == {"a": 20, "b": 20} and min(times["a"]) >= 0
