import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.tables import KEY_TYPES, NativeTable, fresh_rows
from tests.reference.initial_values import EXACT, TOLERANCE, Initializer, initial_rows
from tests.reference.judge import assert_same
from tests.reference.keys import extreme_keys

BANK = np.arange(35, dtype=np.float32).reshape(5, 7)
INITIALIZERS = [
    Initializer("constant", 0.25, 0.0),
    Initializer("uniform", -0.05, 0.05),
    Initializer("uniform", 2.0, 5.0),
    Initializer("normal", 0.5, 2.0),
    Initializer("truncated_normal", -1.0, 0.05),
    Initializer("bank", bank=BANK),
]
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF)


def assert_initial(got, init, seed, keys, dim):
    expected = initial_rows(init, seed, keys, dim)
    if init.kind in EXACT:
        assert_same(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=TOLERANCE * abs(init.b))


@pytest.mark.parametrize("init", INITIALIZERS, ids=lambda init: f"{init.kind}({init.a},{init.b})")
@pytest.mark.parametrize("key_dtype", KEY_TYPES)
def test_fresh_rows_are_the_stated_function_of_seed_and_key(init, key_dtype):
    keys = np.concatenate([extreme_keys(key_dtype.as_numpy_dtype), np.arange(2, 40, dtype=key_dtype.as_numpy_dtype)])
    table = NativeTable(dim=7, key_dtype=key_dtype, seed=77, init=init)
    assert_initial(table.lookup(keys)[0], init, 77, keys, 7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim", [1, 4, 9])
def test_rows_that_are_only_read_are_those_that_would_be_made(seed, dim):
    init = Initializer("uniform", -1.0, 1.0)
    keys = extreme_keys(np.int64)
    got = fresh_rows(keys, seed, init, dim)
    assert_initial(got, init, seed, keys, dim)
    assert_same(NativeTable(dim=dim, seed=seed, init=init).lookup(keys)[0], got)


@pytest.mark.parametrize("init", INITIALIZERS[3:5], ids=lambda init: init.kind)
def test_many_values_agree_with_the_inverse_distribution(init):
    # Enough of them to reach the tails, where a formula of single precision is worst.
    keys = np.arange(4_000)
    got = fresh_rows(keys, 3, init, 4)
    assert_initial(got, init, 3, keys, 4)


@pytest.mark.parametrize(
    ("kind", "mean", "std", "low", "high"),
    [
        ("uniform", 0.5, 12**-0.5, 0.0, 1.0),
        ("normal", 0.0, 1.0, -7.0, 7.0),
        ("truncated_normal", 0.0, 0.8796, -2.0, 2.0),
    ],
)
def test_values_have_the_moments_of_their_distribution(kind, mean, std, low, high):
    x = fresh_rows(np.arange(100_000), 5, Initializer(kind, 0.0, 1.0), 4).astype(np.float64)
    assert np.all(x >= low) and np.all(x <= high)
    # Five standard errors of 400 000 independent values; correlations between neighbours would be larger too.
    error = 5 * std / np.sqrt(x.size)
    assert x.mean() == pytest.approx(mean, abs=error)
    assert x.std() == pytest.approx(std, rel=5 / np.sqrt(x.size))
    z = (x - mean) / std
    assert np.abs(z.T @ z / len(z) - np.eye(4)).max() < 5 * 1.5 / np.sqrt(len(z))  # between elements
    assert np.abs((z[1:] * z[:-1]).mean(axis=0)).max() < 5 / np.sqrt(len(z))  # between neighbouring keys


def test_a_bank_is_drawn_from_evenly():
    table = NativeTable(dim=7, init=Initializer("bank", bank=BANK))
    drawn = (table.lookup(np.arange(5_000))[0].numpy() - np.arange(7)) / 7
    counts = np.bincount(drawn.astype(int).reshape(-1), minlength=5)
    assert np.abs(counts - 7_000).max() < 5 * np.sqrt(35_000 * 0.2 * 0.8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-50, 50), max_size=40), st.integers(1, 4), st.randoms(use_true_random=False))
def test_initial_rows_depend_on_neither_world_size_order_nor_batches(keys, world_size, random):
    whole = NativeTable(dim=3)
    expected = {k: tuple(row) for k, row in zip(keys, whole.lookup(keys)[0].numpy().tolist(), strict=True)}
    shuffled = random.sample(keys, len(keys))
    cut = random.randint(0, len(keys))
    for rank in range(world_size):
        shard = NativeTable(dim=3, world_size=world_size, rank=rank)
        for batch in (shuffled[:cut], shuffled[cut:]):
            shard.lookup([k for k in batch if k % world_size == rank])
        assert shard.as_dict() == {k: row for k, row in expected.items() if k % world_size == rank}
