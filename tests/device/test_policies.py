"""Admission and eviction of tables on a GPU: the tests of the CPU, run there."""

import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from tests.messages import saying
from tests.sok import (
    test_policies,
    test_policy_bloom,
    test_policy_checkpoints,
    test_policy_edges,
    test_policy_full,
    test_policy_options,
)
from tests.sok.policy_cases import KEYS, Both

from .conftest import GPU

_OF_THE_CPU = (
    test_policies,
    test_policy_bloom,
    test_policy_checkpoints,
    test_policy_edges,
    test_policy_full,
    test_policy_options,
)
_LEFT_OUT = {
    # Other words here: below.
    "test_a_table_without_policies_keeps_no_history",
    # No table is looked up.
    "test_policies_are_values",
    "test_tables_are_made_with_policies",
    "test_the_twin_hashes_as_others_do",
    "test_twins_of_other_tables_know_their_policies",
    "test_what_makes_no_sense_is_refused",
    "test_what_policies_are_not",
}
_found = {name: test for module in _OF_THE_CPU for name, test in vars(module).items() if name.startswith("test_")}
assert _found.keys() >= _LEFT_OUT
globals().update({name: test for name, test in _found.items() if name not in _LEFT_OUT})


@pytest.fixture(autouse=True)
def on_the_gpu():
    sok.Init()
    with tf.device(GPU):
        yield


def test_tables_of_these_tests_are_there():
    both = Both.make(admission=sok.Admission(after=2))
    assert both.table.handle.device.endswith("GPU:0")
    for _ in range(2):
        both.train([[KEYS]])
    assert both.table.stats()["gpu_rows"] == both.table.stats()["rows"] == len(KEYS)


def test_a_table_without_policies_knows_no_history_and_has_no_host():
    table = sok.EmbeddingVariable(3, 10, name="without")
    lookup_rows(table, tf.constant([5, 8], tf.int64))
    assert table.stats() == {"rows": 2, "candidates": 0, "made": 2, "refused": 0, "evicted": 0}
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying(table.table_name, "on a GPU alone", "no policies")):
        table.history([5])
