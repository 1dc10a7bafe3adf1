"""Histories and keys that wait for rows in files: full saves, increments, feeds, and tables with other policies."""

import copy

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import read_manifest, verify
from sok.table.state import slot_sets
from tests.sok.policy_cases import KEYS, Both, check_rows, random_batches, twin_of

BOTH = {"admission": sok.Admission(after=3), "eviction": sok.Eviction(older_than=3, every=1)}


def trained(steps=9, seed=0, **policies):
    both, rng = Both.make("adam", **(policies or BOTH)), np.random.default_rng(seed)
    for _ in range(steps):
        both.train(random_batches(rng, 1))
    return both


def restored(folder, saved, policies, **options):
    """Another table, of other policies, from what was saved of one; its twin knows what that one's knew."""
    other = Both.make("adam", **policies)
    sok.restore(folder, {saved.table.table_name: other.table}, other.optimizer, **options)
    rows, candidates = copy.deepcopy((saved.twin.rows, saved.twin.candidates))
    other.twin.rows, other.twin.step, other.updates = rows, saved.twin.step, saved.updates
    other.twin.candidates = candidates if other.twin.after else {}
    return other


def go_on(both, steps=6, seed=5):
    rng = np.random.default_rng(seed)
    both.check(with_counts=False)
    for _ in range(steps):
        both.train(random_batches(rng, 1))
        both.check(with_counts=False)


def test_a_table_goes_on_with_histories_and_with_keys_that_wait(tmp_path):
    both = trained()
    sok.save(tmp_path, both.table, both.optimizer)
    assert both.twin.rows and both.twin.candidates
    go_on(restored(tmp_path, both, BOTH))
    assert verify(tmp_path) == []


def test_increments_have_what_was_counted_admitted_evicted_and_forgotten(tmp_path):
    both, rng = trained(steps=2), np.random.default_rng(1)
    for _ in range(5):
        sok.save(tmp_path, both.table, both.optimizer, incremental=True)
        for _ in range(2):
            both.train(random_batches(rng, 1))
        both.erase(KEYS[:1])
    sok.save(tmp_path, both.table, both.optimizer, incremental=True)
    links = read_manifest(tmp_path).links
    assert len(links) == 6 and any(file.erased for link in links for file in link.files) and both.twin.evicted
    restored(tmp_path, both, BOTH).check(with_counts=False)
    sok.compact(tmp_path)
    go_on(restored(tmp_path, both, BOTH))


def test_a_step_without_new_keys_is_a_small_increment(tmp_path):
    """Counts are changes of the rows that a batch holds, and of no others."""
    both = Both.make(admission=sok.Admission(after=1))
    both.train([[KEYS]])
    sok.save(tmp_path, both.table, both.optimizer, incremental=True)
    both.train([[KEYS[:2]]])
    sok.save(tmp_path, both.table, both.optimizer, incremental=True)
    counts = [sum(file.rows for file in link.files) for link in read_manifest(tmp_path).links]
    assert counts == [len(KEYS), 2]


def test_what_follows_a_table_loses_what_that_evicts(tmp_path):
    both, served = trained(steps=0), Both.make("adam", **BOTH)
    plain = sok.EmbeddingVariable(3, 100, name="plain", seed=5)
    other = sok.follow(tmp_path, {both.table.table_name: plain}, slots=True)
    follower = sok.follow(tmp_path, {both.table.table_name: served.table}, slots=True)
    rng = np.random.default_rng(2)
    for _ in range(12):
        both.train(random_batches(rng, 1))
        sok.save(tmp_path, both.table, both.optimizer, incremental=True)
        assert follower.poll() and other.poll()
        served.twin = both.twin
        served.check(with_counts=False)
        check_rows(plain, both.twin)
    assert both.twin.evicted > 0 and [found.rule for found in slot_sets(plain)] == ["adam"]
    pieces = list(sok.deltas(tmp_path))
    assert {piece.table for piece in pieces} == {both.table.table_name}
    assert sum(len(piece.erased) for piece in pieces) >= both.twin.evicted


@pytest.mark.parametrize("policies", [BOTH, {"eviction": sok.Eviction(older_than=3, every=1)}], ids=str)
def test_rows_of_a_file_without_histories_have_seen_nothing(tmp_path, policies):
    both = Both.make("adam")
    both.train([[KEYS[:4]]])
    sok.save(tmp_path, both.table, both.optimizer)
    for row in both.twin.rows.values():
        row.count = row.last = 0
    both.twin.candidates = {}
    go_on(restored(tmp_path, both, policies))


def test_a_table_without_policies_takes_rows_alone(tmp_path):
    both = trained()
    sok.save(tmp_path, both.table, both.optimizer)
    other = sok.EmbeddingVariable(3, 100, name="without", seed=5)
    sok.restore(tmp_path, {both.table.table_name: other})
    assert set(other.export()[0].numpy().tolist()) == set(both.twin.rows)
    assert [found.rule for found in slot_sets(other)] == ["adam"]
    assert other.stats()["candidates"] == 0


def test_other_policies_go_on_with_what_they_know(tmp_path):
    both = trained()
    sok.save(tmp_path, both.table, both.optimizer)
    for policies in (
        {"eviction": sok.Eviction(older_than=6, every=1)},
        {"admission": sok.Admission(probability=0.5)},
        {"admission": sok.Admission(after=1)},  # who waits has waited enough: its next step gives a row
        {"admission": sok.Admission(after=5), "eviction": sok.Eviction(norm_below=0.3, every=2)},
    ):
        go_on(restored(tmp_path, both, policies))


def test_without_slots_histories_are_restored_all_the_same(tmp_path):
    both = trained()
    sok.save(tmp_path, both.table, both.optimizer)
    other = Both.make("sgd", **BOTH)
    sok.restore(tmp_path, {both.table.table_name: other.table}, slots=False)
    other.twin.rows, other.twin.candidates, other.twin.step = both.twin.rows, both.twin.candidates, both.twin.step
    go_on(other)


def test_a_manager_keeps_what_was_counted(tmp_path):
    both = trained()
    manager = sok.CheckpointManager(tf.train.Checkpoint(table=both.table), tmp_path, max_to_keep=2)
    manager.save()
    kept = copy.deepcopy(both.twin)
    for _ in range(3):
        both.train([[KEYS[:3]]])
    manager.restore_or_initialize()
    both.twin.rows, both.twin.candidates, both.twin.step = kept.rows, kept.candidates, kept.step
    both.check(with_counts=False)


def test_erased_keys_wait_in_no_file(tmp_path):
    both = trained(steps=3)
    waiting, present = next(iter(both.twin.candidates)), next(iter(both.twin.rows))
    sok.save(tmp_path, both.table, both.optimizer)
    report = sok.erase([both.table], [waiting, present], checkpoints=[tmp_path])
    assert report.is_complete, str(report)
    both.twin.erase([waiting, present])
    both.check()
    sok.restore(tmp_path, both.table)
    assert waiting not in both.twin.candidates
    both.check(with_counts=False)


def test_twins_of_other_tables_know_their_policies():
    assert twin_of(trained(steps=0).table).older_than == 3
