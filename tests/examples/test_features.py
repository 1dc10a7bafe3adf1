"""Rare values, buckets of counts and scaled counts against plain statements of what they are."""

import collections
import math

import numpy as np
import pytest
from criteo import features, generate
from criteo.data import ClickLog
from criteo.features import Features

from tests.messages import saying

MIN_COUNT = 3


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return ClickLog(generate.cached_log(tmp_path_factory.mktemp("log"), 3000, 0), holdout=0.3)


def joined(batches, name):
    return np.concatenate([getattr(batch, name) for batch in batches])


def test_buckets_are_two_for_each_doubling():
    counts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, *(2**k + d for k in range(4, 20) for d in (-2, -1, 0))]
    dense = np.log1p(np.array([[-0.0, c] for c in counts], dtype=np.float32))
    keys = features.bucket_keys(dense)
    # floor(2 log2(v)) of a whole number v is the place of the highest bit of its square.
    assert (keys[:, 1] & 0xFFFF).tolist() == [((c + 1) ** 2).bit_length() for c in counts]
    assert len(set(keys[:, 0].tolist())) == 1
    assert not set(keys[:, 0].tolist()) & set(keys[:, 1].tolist())  # another column, other keys
    missing = features.bucket_keys(np.array([[-1.0, -1.0]], dtype=np.float32))
    assert not set(missing.ravel().tolist()) & set(keys.ravel().tolist())


def test_values_are_folded_by_their_count_in_the_training_part_alone(log):
    ours = Features(log, MIN_COUNT)
    ours.count()
    raw = {part: list(log.batches(part, 500)) for part in ("train", "test")}
    keys = {p: np.concatenate([joined(b, "keys"), features.bucket_keys(joined(b, "dense"))], 1) for p, b in raw.items()}
    times = collections.Counter(keys["train"].ravel().tolist())
    rare = [[(1 << 62) | column for column in range(39)]]
    for part in ("train", "test"):
        got = joined(ours.batches(part, 500), "keys")
        is_kept, is_frequent = got == keys[part], np.vectorize(times.get)(keys[part], 0) >= MIN_COUNT
        assert is_kept[is_frequent].all()
        assert is_kept[~is_frequent].mean() < 0.02  # those that share a counter with others
        np.testing.assert_array_equal(got, np.where(is_kept, keys[part], rare))
    # Some values that are rare in the training part are not in the test part: they would give a leak away.
    in_test = collections.Counter(keys["test"].ravel().tolist())
    assert any(times[key] < MIN_COUNT <= n for key, n in in_test.items())


def test_counts_are_scaled_by_the_training_part_and_missing_ones_are_average(log):
    ours = Features(log, MIN_COUNT)
    ours.count()
    raw, dense = (joined(each.batches("test", 500), "dense") for each in (log, ours))
    train = joined(log.batches("train", 500), "dense").astype(np.float64)
    for column in range(13):
        known = [x for x in train[:, column].tolist() if x != -1.0]
        mean = math.fsum(known) / len(known)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known))
        expected = np.where(raw[:, column] == -1.0, 0.0, (raw[:, column] - mean) / deviation)
        np.testing.assert_allclose(dense[:, column], expected, atol=1e-5)


def test_workers_learn_together_what_one_learns(log):
    alone = Features(log, MIN_COUNT)
    alone.count()
    arrays = [[], [], []]

    def note(rank):
        return lambda array: arrays[rank].append(array) or array

    for rank in range(3):
        Features(log, MIN_COUNT, rank, 3).count(note(rank))
    sums = [np.sum(parts, axis=0) for parts in zip(*arrays, strict=True)]
    workers = [Features(log, MIN_COUNT, rank, 3) for rank in range(3)]
    for worker in workers:
        given = iter(sums)
        worker.count(lambda array, given=given: next(given))
    for part in ("train", "test"):
        for one, *three in zip(alone.batches(part, 400), *(w.batches(part, 400) for w in workers), strict=True):
            np.testing.assert_array_equal(joined(three, "keys"), one.keys)
            np.testing.assert_allclose(joined(three, "dense"), one.dense, atol=1e-6)


def test_batches_before_counting_are_an_error(log):
    with pytest.raises(ValueError, match=saying("`count` must be called before `batches`")):
        next(Features(log, MIN_COUNT).batches("train", 10))
