"""Inputs: the same for everybody, and shaped as they say."""

import numpy as np
import pytest

from benchmarks import synthetic, workloads
from tests.messages import saying


def bags(**changes):
    sizes = {"tables": 3, "rows": 1000, "batch": 64, "hotness": 5, "distribution": "zipf", "number": 0}
    return workloads.make_bags(**{**sizes, **changes})


def test_scattered_keys_are_distinct_and_continue():
    keys = workloads.scattered_keys(0, 100_000)
    assert len(np.unique(keys)) == 100_000
    np.testing.assert_array_equal(workloads.scattered_keys(70_000, 100_000), keys[70_000:])


def test_hashed_ids_differ_between_tables_and_ids():
    ids = np.arange(10_000)
    keys = np.concatenate([workloads.hashed_ids(ids, t) for t in range(4)])
    assert len(np.unique(keys)) == 40_000


@pytest.mark.parametrize("distribution", workloads.DISTRIBUTIONS)
def test_bags_are_within_their_limits_and_repeatable(distribution):
    one, again, other = bags(distribution=distribution), bags(distribution=distribution), bags(number=1)
    np.testing.assert_array_equal(one.ids, again.ids)
    assert len(one.ids) != len(other.ids) or not np.array_equal(one.ids, other.ids)
    lengths = np.diff(one.offsets, axis=1)
    assert lengths.min() == 1 and lengths.max() == 5
    assert one.ids.min() >= 0 and one.ids.max() < 1000
    assert one.base[-1] == len(one.ids)


def test_one_hot_has_one_id_each():
    np.testing.assert_array_equal(np.diff(bags(hotness=1).offsets, axis=1), 1)


def test_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match=saying("`distribution`")):
        bags(distribution="normal")


def test_parts_of_workers_are_the_whole_batch():
    whole = bags()
    parts = [whole.part(rank, 4) for rank in range(4)]
    for t in range(whole.num_tables):
        np.testing.assert_array_equal(np.concatenate([part.table(t)[0] for part in parts]), whole.table(t)[0])
        lengths = np.concatenate([np.diff(part.table(t)[1]) for part in parts])
        np.testing.assert_array_equal(lengths, np.diff(whole.table(t)[1]))


def test_stacked_tables_hold_the_same_segments():
    whole = bags()
    ids, offsets = whole.stacked(1000)
    for t in range(whole.num_tables):
        values, splits = whole.table(t)
        for s in (0, 17, 63):
            segment = ids[offsets[t * 64 + s] : offsets[t * 64 + s + 1]]
            np.testing.assert_array_equal(segment - t * 1000, values[splits[s] : splits[s + 1]])
    assert offsets[-1] == len(ids)


def test_zipf_prefers_low_ranks_by_the_law():
    ranks = workloads.Zipf(1000).draw(np.random.default_rng(0), 200_000)
    counts = np.bincount(ranks, minlength=1000)
    assert ranks.max() <= 999
    assert counts[0] / counts[9] == pytest.approx(10**workloads.ZIPF_EXPONENT, rel=0.1)


@pytest.mark.parametrize("rows", [10, 1000, 1_000_000])
def test_permuted_ranks_stay_distinct_rows(rows):
    ranks = np.arange(min(rows, 5000))
    for table in range(3):
        ids = workloads.permuted(ranks, rows, table)
        assert len(np.unique(ids)) == len(ranks) and ids.max() < rows


@pytest.mark.parametrize(
    ("name", "tables", "inputs", "width", "floats"),
    [
        ("tiny", 55, 58, 682, 1_123_681_280),
        ("small", 107, 116, 2522, 7_058_084_800),
        ("criteo", 26, 26, 3341, 332_800_000),
        ("medium", 311, 337, 2494, 55_349_145_600),  # 17,280 in sevens
    ],
)
def test_synthetic_models_are_as_published(name, tables, inputs, width, floats):
    model = synthetic.load(name)
    assert (len(model.tables), len(model.features()), model.width) == (tables, inputs, width)
    assert model.bytes == 4 * floats


def test_power_law_stays_in_the_table_and_prefers_low_ids():
    ids = synthetic.power_law(np.random.default_rng(0), 1000, 100_000, 1.05)
    assert ids.min() == 0 and ids.max() <= 999
    assert (ids == 0).sum() > 5 * (ids == 9).sum()
