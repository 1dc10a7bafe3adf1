"""Distinct keys and owners: what any backend must answer."""

import numpy as np
import pytest

from tests.messages import saying
from tests.reference.keys import KEY_DTYPES, extreme_keys
from tests.reference.unique import unique


def skewed(rng: np.random.Generator, n: int, dtype: type) -> np.ndarray:
    """Frequent keys, rare ones, and the extreme values of the dtype."""
    keys = np.where(rng.random(n) < 0.5, rng.integers(0, 5, n), rng.integers(0, 2**31 - 1, n)).astype(dtype)
    extreme = extreme_keys(dtype)
    keys[: len(extreme)] = extreme[:n]
    return rng.permutation(keys)


@pytest.mark.sanitize
@pytest.mark.parametrize("n", [0, 1, 256, 257, 5000])
@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_unique_gives_keys_in_order_of_first_appearance(backend, rng, dtype, n):
    keys = skewed(rng, n, dtype)
    got = backend.unique(keys)
    assert got[0].dtype == dtype
    for ours, expected in zip(got, unique(keys), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_unique_in_any_order_gives_the_keys_back(cuda, rng):
    import sok.cuda

    keys = skewed(rng, 3000, np.int64)
    found = sok.cuda.unique(cuda.put(keys), order="any")
    distinct, inverse, counts = map(cuda.get, found)
    np.testing.assert_array_equal(distinct[inverse], keys)
    np.testing.assert_array_equal(np.sort(distinct), np.unique(keys))
    np.testing.assert_array_equal(counts, np.bincount(inverse))


@pytest.mark.sanitize
@pytest.mark.parametrize("world", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_partition_sends_each_key_to_key_mod_world(cuda, rng, dtype, world):
    import sok.cuda

    keys = skewed(rng, 1000, dtype)
    moved, positions, places, counts = map(cuda.get, sok.cuda.partition_keys(cuda.put(keys), world))
    owners = np.array([int(key) % world for key in keys])
    np.testing.assert_array_equal(positions, np.argsort(owners, kind="stable"))
    np.testing.assert_array_equal(moved, keys[positions])
    np.testing.assert_array_equal(moved[places], keys)
    np.testing.assert_array_equal(counts, np.bincount(owners, minlength=world))


def test_partition_of_a_table_on_one_rank_sends_it_everything(cuda):
    import sok.cuda

    counts = sok.cuda.partition_keys(cuda.put(np.arange(5)), 3, owner=2).counts
    np.testing.assert_array_equal(cuda.get(counts), [0, 0, 5])


def test_bad_arguments_are_named(cuda):
    import sok.cuda

    keys = cuda.put(np.arange(3))
    with pytest.raises(TypeError, match=saying("`keys`", "of int64 or", "Received: float32")):
        sok.cuda.unique(cuda.put(np.zeros(2, np.float32)))
    with pytest.raises(ValueError, match=saying("`keys`", "shape [?]", "Received: [2, 2]")):
        sok.cuda.unique(cuda.put(np.zeros((2, 2), np.int64)))
    with pytest.raises(ValueError, match=saying("`order`", "Received: 'sorted'")):
        sok.cuda.unique(keys, order="sorted")
    with pytest.raises(ValueError, match=saying("world_size", "at least 1", "Received: 0")):
        sok.cuda.partition_keys(keys, 0)
    with pytest.raises(ValueError, match=saying("owner", "rank of the 2", "Received: 2")):
        sok.cuda.partition_keys(keys, 2, owner=2)
