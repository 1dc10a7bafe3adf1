"""Rows that leave when the table is full, rows that keys share, and what others read, beside twins of NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from sok.table.state import count_step
from tests.messages import saying
from tests.sok.full_cases import FULL, MOST, full_case, shared_case


@pytest.mark.parametrize("kind", FULL)
def test_a_full_table_gives_up_what_its_twin_does(kind):
    full_case(kind)


def test_the_same_rows_leave_over_a_file_and_ahead(tmp_path):
    full_case("fading", tmp_path)
    full_case("recent", ahead=True)


def test_keys_that_wait_share_rows_that_learn(tmp_path):
    shared_case()
    shared_case(tmp_path)


def test_what_a_full_table_gave_up_is_a_deletion_in_increments(tmp_path):
    where = {"placement": sok.row_wise(hash=True), "eviction": sok.Eviction.least_recent()}
    make = lambda name: sok.EmbeddingVariable(1, MOST, name=name, seed=5, **where)  # noqa: E731
    table = make("increments")
    for step, keys in enumerate(np.arange(16000).reshape(4, 4000)):
        lookup_rows(table, tf.constant(keys))
        count_step([table])
        if step in (1, 3):
            sok.save(tmp_path, table, incremental=True)
    assert table.stats()["evicted"] > 4000
    other = make("increments_restored")
    sok.restore(tmp_path, {"increments": other})
    assert set(other.export()[0].numpy()) == set(table.export()[0].numpy())
    assert other.history([15999])[1].numpy().tolist() == [4]


def test_bytes_become_rows_once():
    eviction = sok.Eviction.least_recent(memory_bytes=2**20, slots=2)
    table = sok.EmbeddingVariable(5, 100_000, name="bytes", placement=sok.row_wise(hash=True), eviction=eviction)
    assert table.options.eviction.max_rows == 2**20 // (4 * 8 * 3 + 56) and table.options.eviction.memory_bytes is None
    assert sok.TableOptions.from_config(table.options.get_config()) == table.options


def test_who_has_no_row_reads_what_was_said():
    admission = sok.Admission(after=2, unadmitted=-2.0)
    table = sok.EmbeddingVariable(2, 10, name="constant", initializer="ones", admission=admission)
    read = lambda: table.sparse_read(tf.constant([7])).numpy().tolist()  # noqa: E731
    assert lookup_rows(table, tf.constant([7])).numpy().tolist() == read() == [[-2.0, -2.0]]
    count_step([table])
    assert lookup_rows(table, tf.constant([7])).numpy().tolist() == read() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sok.Eviction.least_recent(100), ("`max_rows`", "4096", "100")),
        (lambda: sok.Eviction.least_recent(5000, memory_bytes=10), ("`memory_bytes`", "`max_rows`")),
        (lambda: sok.Eviction(older_than=3, memory_bytes=10), ("`memory_bytes`", "least_recent")),
        (lambda: sok.Eviction(older_than=3, protect="7"), ("`protect`", "list of keys")),
        (lambda: sok.Eviction(older_than=3, protect=[2**64]), ("`protect`", "whole number")),
        (lambda: sok.Eviction(older_than=3, protect=range(70_000)), ("`protect`", "65,536", "70,000")),
        (lambda: sok.Eviction.least_recent(slots=-1), ("`slots`", "-1")),
        (lambda: sok.Admission(after=2, shared_rows=5000), ("`shared_rows`", "multiple of 4,096")),
        (lambda: sok.Admission(after=2, shared_rows=4096, unadmitted=0.0), ("`unadmitted` or `shared_rows`",)),
        (lambda: sok.Admission(after=2, unadmitted="0"), ("`unadmitted`", "number")),
        (
            lambda: sok.EmbeddingVariable(
                2, 100, placement=sok.row_wise(hash=True), eviction=sok.Eviction.least_recent()
            ),
            ("`eviction`", "4,096 rows", "capacity 100"),
        ),
        (
            lambda: sok.TableOptions(hashed=False, eviction=sok.Eviction.least_recent()),
            ("`eviction`", "hashed tables"),
        ),
        (
            lambda: sok.TableOptions(key_dtype="int32", placement=sok.row_wise(hash=True), admission=sharing()),
            ("`shared_rows`", "int32", "int64"),
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(ValueError, match=saying(*words)):
        make()


def sharing() -> sok.Admission:
    return sok.Admission(after=2, shared_rows=4096)


def test_a_table_from_which_nothing_leaves_has_nobody_to_tell():
    table = sok.EmbeddingVariable(2, 10, name="untold")
    with pytest.raises(ValueError, match=saying("no `eviction`", "untold")):
        table.on_evicted(print)
