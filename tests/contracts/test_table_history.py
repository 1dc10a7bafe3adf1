"""Any history of calls leaves a device's table as its NumPy statement says."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hypothesis")  # a machine with a GPU may lack it

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.test_table import Pair


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "read", "assign", "erase"]), st.lists(st.integers(-5, 60), max_size=40)),
        max_size=8,
    ),
    st.booleans(),
)
def test_any_history_leaves_what_the_statement_says(cuda, history, hashed):
    pair = Pair(cuda, dim=3, capacity=61, hashed=hashed)
    for number, (what, keys) in enumerate(history):
        keys = np.array([key for key in keys if hashed or key >= 0], np.int64)
        if what in ("insert", "read"):
            distinct = len(set(keys.tolist()) | set(pair.expected.rows))
            if distinct <= 61:
                pair.check_lookup(keys, insert=what == "insert")
        elif what == "assign":
            rows = np.arange(3 * len(keys), dtype=np.float32).reshape(-1, 3) + 1000 * number
            if len(set(keys.tolist()) | set(pair.expected.rows)) <= 61:
                pair.expected.assign(keys, rows)
                pair.table.assign(pair.cuda.put(keys), pair.cuda.put(rows))
        else:
            pair.expected.erase(keys)
            pair.table.erase(pair.cuda.put(keys))
    found = pair.contents()
    assert set(found) == set(pair.expected.rows)
    for key, row in pair.expected.rows.items():
        np.testing.assert_array_equal(found[key], row)
