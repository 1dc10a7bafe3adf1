"""Admission and eviction on several workers: what one worker does with the concatenated batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.job.job import Job
from sok.job.transport.local import LocalTransport
from sok.lookup.lookup import lookup_rows
from sok.table.state import count_step
from tests.messages import saying
from tests.placements import ALL_PLACEMENTS
from tests.reference.policies import left_of
from tests.sok import version_policy_cases
from tests.sok.full_cases import FULL, full_case, shared_case
from tests.sok.policy_cases import KEYS, Both, as_tensors, gathered, random_batches
from tests.sok.storage_cases import LITTLE

STEPS = 8
POLICIES = {
    "by key": {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=3, norm_below=0.2, every=2)},
    "by hash": {"admission": sok.Admission(probability=0.6), "eviction": sok.Eviction(norm_below=0.3, every=3)},
    "columns": {"admission": sok.Admission(probability=0.6), "eviction": sok.Eviction(older_than=3, every=1)},
    "copies": {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=3, norm_below=0.2, every=2)},
}


def batches_of(world, seed):
    """Of all workers, the same on each; the last has none in every third step. What comes often moves on."""
    rng = np.random.default_rng(seed)
    found = [random_batches(rng, world.size, np.roll(KEYS, -2 * step)[:7]) for step in range(STEPS)]
    for batches in found[2::3]:
        batches[-1] = [keys[:0] for keys in batches[-1]]
    return found


def check_policies_do_what_they_do_on_one_worker(world):
    for number, (words, policies) in enumerate(POLICIES.items()):
        placement, rule = ALL_PLACEMENTS[words](world.size), "adam" if number % 2 else "sgd"
        both = Both.make(rule, number > 1, placement=placement, **policies)
        for step, batches in enumerate(batches_of(world, number)):
            both.train(batches)
            if step == 3:
                both.assign(np.array([5, -1]))
                both.erase(np.array([0, 8]))
                both.evaluate(np.array([0, 1, 2**40]))
            if step in (3, STEPS - 1):
                both.check()
        assert both.twin.evicted and both.twin.refused and both.twin.rows


def check_policies_count_in_the_step_whose_keys_went_ahead(world):
    both = Both.make(name="ahead", in_function=True, **POLICIES["by key"])
    batches = batches_of(world, 7)
    mine = [as_tensors(features[world.rank]) for features in batches]
    for number, (_, ticket) in enumerate(sok.ahead(mine, both.look_up, depth=2)):
        both.train(batches[number], ticket)
        if number % 4 == 3:
            both.check()
    assert both.twin.step == STEPS and both.twin.evicted


def check_policies_of_many_go_on_with_one(world, tmp_path_of_rank, monkeypatch):
    folder = tmp_path_of_rank.parent / f"policies_of_{world.size}"
    both = Both.make("adam", name="saved", **POLICIES["by key"])
    for number, batches in enumerate(batches_of(world, 11)):
        both.train(batches)
        if number == 3:
            sok.save(folder, both.table, both.optimizer, incremental=True)
    both.erase(np.array([5]))
    both.train([[np.array([5])]] * world.size)  # 5 waits
    sok.save(folder, both.table, both.optimizer, incremental=True)
    assert both.twin.candidates and both.twin.rows
    saved_as, twin = both.table.table_name, both.twin
    with monkeypatch.context() as patch:  # every worker alone, and so does the same
        alone = Job(LocalTransport())
        patch.setattr(context, "get_job", lambda: alone)
        other = Both.make("adam", name="restored", **POLICIES["by key"])
        sok.restore(folder, {saved_as: other.table}, other.optimizer)
        other.twin.rows, other.twin.candidates, other.twin.step = twin.rows, twin.candidates, twin.step
        other.updates = both.updates
        other.check(with_counts=False)
        for batches in batches_of(world, 13)[:3]:
            other.train(batches[:1])
        other.check(with_counts=False)


def check_versions_of_many_go_on_as_ordinary_saves_do(world, tmp_path_of_rank, monkeypatch):
    """On as many workers, and on each alone."""
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    for kind in ("counted", "filter", "full"):
        folder = tmp_path_of_rank.parent / f"versions_{kind}_of_{world.size}"
        table, optimizer = version_policy_cases.make(kind, f"of_many_{kind}", folder / f"rows{world.rank}")
        version_policy_cases.train(table, optimizer, range(9))
        sok.save(folder / "ordinary", table, optimizer)
        saving = sok.save(folder / "version", table, optimizer, versions=True, asynchronous=True)
        version_policy_cases.train(table, optimizer, range(9, 13))  # beside it
        saving.result()

        def go_on(where, kind=kind, folder=folder, saved_as=table.table_name):
            found = []
            for way in ("version", "ordinary"):
                other, fresh = version_policy_cases.make(kind, f"{way}_{kind}_{where}", folder / f"{way}{world.rank}")
                sok.restore(folder / way, {saved_as: other}, fresh)
                found.append([version_policy_cases.holds(other)])
                version_policy_cases.train(other, fresh, range(9, 12))
                found[-1].append(version_policy_cases.holds(other))
            assert found[0] == found[1] and found[0][0] != found[0][1]

        go_on("many")
        with monkeypatch.context() as patch:
            alone = Job(LocalTransport())
            patch.setattr(context, "get_job", lambda job=alone: job)
            go_on("one")


def check_crowded_buckets_keep_what_they_keep_on_one_worker(world):
    batches = [np.arange(0, 60_000), np.arange(40_000, 80_000), np.arange(0, 90_000, 3), np.arange(50_000, 90_000)]
    keys, counts, lasts = np.arange(90_000), np.zeros(90_000), np.zeros(90_000, np.int64)
    for step, batch in enumerate(batches):
        counts[batch] += 1
        lasts[batch] = step + 1
    for options in ({}, {"keep": "frequent"}, {"keep": "frequent", "half_life": 2}):
        eviction = sok.Eviction(max_rows=65_537, every=len(batches), **options)
        name = f"crowded_{len(options)}"
        table = sok.EmbeddingVariable(1, 90_000, name=name, placement=sok.row_wise(hash=True), eviction=eviction)
        for batch in batches:
            lookup_rows(table, tf.constant(batch[world.rank :: world.size]))
            count_step([table])
        expected = left_of(keys, counts, lasts, len(batches), 65_537, options.get("half_life"), not options)
        mine = table.export()[0].numpy()
        np.testing.assert_array_equal(np.sort(gathered(mine, "crowded")), sorted(expected))
        assert table.stats()["evicted"] == len(keys) - len(expected) > 20_000


def check_policies_that_see_whole_rows_refuse_cut_ones(world):
    for policies, argument in (
        ({"eviction": sok.Eviction(norm_below=0.1, every=1)}, "`norm_below`"),
        ({"admission": sok.Admission(after=2)}, "`admission`"),
    ):
        with pytest.raises(ValueError, match=saying(argument, "column_wise", "sok.row_wise()")):
            Both.make(placement=sok.column_wise(2), **policies)


def check_histories_are_asked_for_where_they_lie(world):
    both = Both.make(admission=sok.Admission(after=1))
    everyone = [[np.arange(3 * world.size)]] * world.size
    both.train(everyone)
    keys = np.arange(3 * world.size)
    counts, lasts = (np.asarray(tensor) for tensor in both.table.history(keys))
    np.testing.assert_array_equal(counts, keys % world.size == world.rank)
    np.testing.assert_array_equal(lasts, counts)
    both.check()


def check_full_tables_give_up_what_they_give_up_on_one_worker(world):
    for kind in FULL:
        full_case(kind)
    full_case("recent", ahead=True)
    shared_case()
    with pytest.raises(ValueError, match=saying("`eviction`", "sok.row_wise(hash=True)")):
        sok.TableOptions(placement=sok.row_wise(), eviction=sok.Eviction.least_recent())
