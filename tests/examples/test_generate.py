"""The generated log: repeatable, well-formed, and with a known best AUC."""

import numpy as np
import pytest
from criteo import generate, metrics
from criteo.data import ClickLog

ROWS = 20_000


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    return generate.cached_log(tmp_path_factory.mktemp("generated"), ROWS, 3)


def test_same_rows_and_seed_give_the_same_bytes(log_path, tmp_path):
    again = generate.generate(tmp_path / "again.tsv", ROWS, 3)
    assert again.read_bytes() == log_path.read_bytes()
    other = generate.generate(tmp_path / "other.tsv", 1000, 4)
    assert other.read_bytes() != generate.generate(tmp_path / "third.tsv", 1000, 3).read_bytes()


def test_rows_do_not_depend_on_how_they_are_cut_into_pieces():
    model = generate.ClickModel(1000, 5)
    whole = model.sample(0, 1000)[0]
    pieces = [model.sample(first, 250)[0] for first in range(0, 1000, 250)]
    for name in ("labels", "counts", "categories", "probabilities"):
        np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in pieces]), getattr(whole, name))


def test_written_log_reads_back_as_what_was_sampled(tmp_path):
    model = generate.ClickModel(600, 0)
    rows = model.sample(0, 600)[0]
    path = tmp_path / "a.tsv"
    path.write_bytes(generate.format_rows(rows, 0))
    log = ClickLog(str(path), holdout=0.5)
    batches = [next(iter(log.batches(part, 300))) for part in ("train", "test")]
    keys = np.concatenate([b.keys for b in batches])
    assert np.concatenate([b.labels for b in batches]).tolist() == rows.labels.tolist()
    missing = rows.counts == generate.MISSING_COUNT
    expected = np.where(missing, -1.0, np.log1p(np.maximum(rows.counts, 0)))
    np.testing.assert_allclose(np.concatenate([b.dense for b in batches]), expected, rtol=1e-6)
    assert missing.any()
    np.testing.assert_array_equal((keys >> 32) & 1, rows.categories < 0)
    for column in range(26):  # one key for one value
        pairs = np.unique(np.stack([keys[:, column], rows.categories[:, column]]), axis=1).shape[1]
        assert pairs == np.unique(keys[:, column]).size == np.unique(rows.categories[:, column]).size


def test_truth_is_calibrated_and_much_better_than_chance(log_path):
    truth = np.load(generate.truth_path(log_path))
    log = ClickLog(str(log_path))
    labels = np.concatenate([b.labels for part in ("train", "test") for b in log.batches(part, 5000)])
    assert truth.shape == labels.shape == (ROWS,)
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        inside = (truth >= low) & (truth < high)
        # Four standard errors of a click rate.
        assert abs(labels[inside].mean() - truth[inside].mean()) < 4 * 0.5 / np.sqrt(inside.sum())
    assert abs(labels.mean() - 0.25) < 0.02
    assert 0.78 < metrics.auc(labels, truth) < 0.88


def test_categories_follow_zipfs_law(log_path):
    log = ClickLog(str(log_path))
    keys = np.concatenate([b.keys for b in log.batches("train", 5000)])
    counts = np.sort(np.unique(keys[:, 2], return_counts=True)[1])[::-1]
    assert counts.size > 1000
    slope = np.polyfit(np.log(np.arange(2, 31)), np.log(counts[1:30]), 1)[0]
    assert -1.4 < slope < -0.8


def test_cached_log_is_written_once(tmp_path):
    path = generate.cached_log(tmp_path, 500, 0)
    stamp = path.stat().st_mtime_ns
    assert generate.cached_log(tmp_path, 500, 0) == path
    assert path.stat().st_mtime_ns == stamp
    assert generate.cached_log(tmp_path, 501, 0) != path
    assert sorted(p.name for p in tmp_path.iterdir() if "part" in p.name) == []


@pytest.mark.parametrize(("rows", "seed", "name"), [(9, 0, "rows"), (100, -1, "seed")])
def test_bad_arguments_are_named(tmp_path, rows, seed, name):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        generate.generate(tmp_path / "a", rows, seed)
