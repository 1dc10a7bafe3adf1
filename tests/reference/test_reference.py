"""The judges are judged: against other statements of the same thing, and by seeing them fail."""

import numpy as np
import pytest

from tests.reference import combine, csr, exchange, initial_values, judge, segment_sum, sparse_update, unique
from tests.reference.initial_values import Initializer
from tests.reference.keys import KEY_DTYPES, extreme_keys, word
from tests.reference.philox import KNOWN_ANSWERS, philox4x32
from tests.reference.table import IllegalKey, Table, TableFull


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, output):
    assert philox4x32(counter, key) == output


def test_philox_sees_one_bit():
    counter, key, output = KNOWN_ANSWERS[0]
    assert philox4x32((1, *counter[1:]), key) != output
    assert philox4x32(counter, (key[0], 1)) != output


def test_words_of_keys_are_twos_complement():
    assert word(-1) == 2**64 - 1
    assert word(np.int32(-(2**31))) == 2**64 - 2**31
    assert word(np.uint32(2**31)) == 2**31
    assert word(np.uint64(2**64 - 1)) == 2**64 - 1


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_extreme_keys_hold_the_ends_of_the_dtype(dtype):
    keys = extreme_keys(dtype)
    assert keys.dtype == dtype
    assert {int(np.iinfo(dtype).min), 0, int(np.iinfo(dtype).max)} <= {int(k) for k in keys}
    assert len({int(k) for k in keys}) == len(keys)


def test_unique_agrees_with_numpy(rng):
    x = rng.integers(0, 50, 300)
    values, inverse, counts = unique.unique(x)
    np.testing.assert_array_equal(values[inverse], x)
    np_values, np_first, np_counts = np.unique(x, return_index=True, return_counts=True)
    order = np.argsort(np_first)
    np.testing.assert_array_equal(values, np_values[order])
    np.testing.assert_array_equal(counts, np_counts[order])


def test_segment_sum_agrees_with_numpy_add_at(rng):
    data, ids = rng.normal(size=(40, 3)), rng.integers(-1, 7, 40)
    expected = np.zeros((7, 3))
    np.add.at(expected, ids[ids >= 0], data[ids >= 0])
    np.testing.assert_allclose(segment_sum.unsorted_segment_sum(data, ids, 7), expected)
    with pytest.raises(ValueError, match="6 is not below 6"):
        segment_sum.unsorted_segment_sum(data, np.full(40, 6), 6)


def test_owner_is_never_negative():
    assert [exchange.owner(k, 3) for k in (-4, -3, -1, 0, 5)] == [2, 0, 2, 0, 2]


def test_route_lays_answers_out_behind_headers():
    # Two features share the first table, of dim 2; the second has dim 3.
    features = [(0, np.array([5, 2, 5])), (1, np.array([2])), (0, np.array([4, 2, 3]))]
    asked, places, first = exchange.route(features, [2, 3], 2)
    assert asked == [[[2, 4], [2]], [[5, 3], []]]
    # 16 floats of header, 2, 4 (2 floats each), 2 (3 floats), header, 5, 3
    np.testing.assert_array_equal(places[0], [39, 16, 39])
    np.testing.assert_array_equal(places[1], [20])
    np.testing.assert_array_equal(places[2], [18, 16, 41])
    assert [f.tolist() for f in first] == [[True, True, False], [True], [True, False, True]]


def test_messages_are_bit_patterns():
    sent = exchange.message([[2**32 - 1], [], [7]], [[], [[4, 2], [4]]], 32, program=3, call=9, insert=False)
    np.testing.assert_array_equal(sent, [exchange.MAGIC, 3, 9, 0, 0, 0, 0, 1, 0, 1, 0, 0, 2, 3, -1, 7, 2, 1, 4, 2, 4])
    assert exchange.cut(np.array([4, 1, 2, 4]), np.array([0, 3, 3, 4]), 2) == [[[4, 2], [4]], [[1]]]


def test_all_to_all_is_its_own_inverse(rng):
    splits = [rng.integers(0, 4, 3) for _ in range(3)]
    messages = [rng.normal(size=(s.sum(), 2)) for s in splits]
    back, back_splits = exchange.all_to_all(*exchange.all_to_all(messages, splits))
    for r in range(3):
        np.testing.assert_array_equal(back[r], messages[r])
        np.testing.assert_array_equal(back_splits[r], splits[r])
    with pytest.raises(ValueError, match="rank 0 sends"):
        exchange.all_to_all([np.zeros(3)], [np.array([2])])


@pytest.mark.parametrize("combiner", combine.COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_combine_gradients_agree_with_differences(rng, combiner, weighted):
    rows, index = rng.normal(size=(4, 3)), np.array([0, 2, 2, 3, 1])
    splits, grad = np.array([0, 2, 2, 5]), rng.normal(size=(3, 3))
    weights = rng.uniform(0.5, 2.0, 5) if weighted else None

    def loss(rows, weights):
        return float(np.sum(combine.combine(rows, index, splits, weights, combiner) * grad))

    got = combine.combine_grad_rows(grad, index, splits, weights, 4, combiner)
    for i, j in np.ndindex(4, 3):
        step = np.zeros_like(rows)
        step[i, j] = 1e-6
        assert got[i, j] == pytest.approx((loss(rows + step, weights) - loss(rows - step, weights)) / 2e-6, abs=1e-6)
    if weighted:
        got = combine.combine_grad_weights(grad, rows, index, splits, weights, combiner)
        for i in range(5):
            step = np.zeros(5)
            step[i] = 1e-6
            slope = (loss(rows, weights + step) - loss(rows, weights - step)) / 2e-6
            assert got[i] == pytest.approx(slope, abs=1e-6)


def test_combine_divides_as_it_says():
    rows, splits, weights = np.array([[3.0], [4.0]]), np.array([0, 2, 2]), np.array([3.0, 4.0])
    both = np.arange(2)
    np.testing.assert_allclose(combine.combine(rows, both, splits, weights, "sum"), [[25.0], [0.0]])
    np.testing.assert_allclose(combine.combine(rows, both, splits, weights, "mean"), [[25.0 / 7.0], [0.0]])
    np.testing.assert_allclose(combine.combine(rows, both, splits, weights, "sqrtn"), [[5.0], [0.0]])
    np.testing.assert_allclose(combine.combine(rows, both, splits, np.array([1.0, -1.0]), "mean"), [[0.0], [0.0]])
    with pytest.raises(ValueError, match="combiner must be one of"):
        combine.combine(rows, both, splits, None, "max")


def test_sparse_to_csr_is_stable():
    splits, order = csr.sparse_to_csr(np.array([2, 0, 2, 0]), 4)
    np.testing.assert_array_equal(splits, [0, 2, 2, 4, 4])
    np.testing.assert_array_equal(order, [1, 3, 0, 2])


def test_first_fault_finds_segments_before_samples():
    splits = np.array([0, 2, 2, 3, 7])
    assert csr.first_fault(splits, 2, 0, 0) is None
    assert csr.first_fault(splits, 2, 4, 5) is None
    assert csr.first_fault(splits, 2, 3, 0) == ("segment", 3)
    assert csr.first_fault(splits, 2, 0, 4) == ("sample", 1)
    assert csr.first_fault(splits, 2, 3, 1) == ("segment", 3)


def test_sum_duplicates_drops_negative_ids():
    ids, sums = sparse_update.sum_duplicates(np.array([4, -1, 2, 4]), np.array([[1.0], [2.0], [3.0], [5.0]]))
    np.testing.assert_array_equal(ids, [4, 2])
    np.testing.assert_array_equal(sums, [[6.0], [3.0]])


def test_initial_rows_have_the_moments_they_promise():
    keys = np.arange(400)
    uniform = initial_values.initial_rows(Initializer("uniform", -1.0, 3.0), 7, keys, 9)
    assert uniform.min() >= -1 and uniform.max() < 3
    assert uniform.mean() == pytest.approx(1.0, abs=0.08) and uniform.std() == pytest.approx(4 / 12**0.5, rel=0.04)
    normal = initial_values.initial_rows(Initializer("normal", 1.0, 2.0), 7, keys, 9)
    assert normal.mean() == pytest.approx(1.0, abs=0.14) and normal.std() == pytest.approx(2.0, rel=0.05)
    cut = initial_values.initial_rows(Initializer("truncated_normal", 0.0, 1.0), 7, keys, 9)
    assert np.abs(cut).max() <= 2 and cut.std() == pytest.approx(0.8796, rel=0.05)
    with pytest.raises(ValueError, match="unknown initializer 'zeros'"):
        initial_values.initial_row(Initializer("zeros"), 0, 0, 1)


def test_initial_rows_depend_on_seed_key_and_element():
    init = Initializer("uniform", 0.0, 1.0)
    row = initial_values.initial_row(init, 1, 5, 8)
    assert len(set(row.tolist())) == 8
    assert not np.array_equal(row, initial_values.initial_row(init, 2, 5, 8))
    assert not np.array_equal(row, initial_values.initial_row(init, 1, 6, 8))
    assert not np.array_equal(row, initial_values.initial_row(init, 1, 5 + 2**32, 8))
    np.testing.assert_array_equal(row[:3], initial_values.initial_row(init, 1, 5, 3))


def test_table_refuses_what_does_not_fit():
    table = Table(dim=2, capacity=2)
    table.lookup(np.array([7]), insert=True)
    with pytest.raises(TableFull):
        table.lookup(np.array([8, 7, 9]), insert=True)
    assert list(table.rows) == [7]
    with pytest.raises(IllegalKey):
        Table(dim=2, capacity=2, hashed=False).lookup(np.array([2]), insert=False)
    with pytest.raises(IllegalKey):
        Table(dim=2, capacity=2, world_size=2, rank=1).lookup(np.array([2]), insert=False)


def test_table_keeps_the_last_of_duplicates():
    table = Table(dim=1, capacity=4, world_size=2, rank=1)
    table.assign(np.array([3, 2, 3]), np.array([[1.0], [2.0], [3.0]]))
    assert {k: v.tolist() for k, v in table.rows.items()} == {3: [3.0]}
    assert table.erase(np.array([3, 3, 2])) == 1


# Each judge must see a failure.


def test_assert_same_sees_values_shapes_and_kinds():
    judge.assert_same([1, 2], [1, 2])
    for bad in ([1, 3], [1, 2, 3], [[1, 2]], [1.0, 2.0], 1):
        with pytest.raises(AssertionError):
            judge.assert_same(bad, [1, 2])
    with pytest.raises(AssertionError):
        judge.assert_same([1, 1], 1)


def test_assert_close_sees_differences_beyond_the_tolerance():
    one = np.ones(3, np.float32)
    judge.assert_close(one, one * (1 + 5e-6))
    for bad in (one * (1 + 5e-5), one + np.array([0, 0, 1e-4]), one * np.nan, one[:2], one * np.inf):
        with pytest.raises(AssertionError):
            judge.assert_close(bad.astype(np.float32), one)
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):
        judge.assert_close(np.array([1.0, 1.1, 1.0], np.float32), one)
    with pytest.raises(AssertionError):
        judge.assert_close(one, np.array([1.0, np.inf, 1.0]))
    judge.assert_close(np.array([np.inf], np.float32), np.array([np.inf]))
    judge.assert_close(np.float32(1.0), np.float64(1.0 + 1e-6))


def test_assert_same_table_sees_missing_extra_doubled_and_changed_keys():
    expected = {3: np.array([1.0]), 4: np.array([2.0])}
    judge.assert_same_table(np.array([4, 3]), np.array([[2.0], [1.0]]), expected)
    for keys, rows in (
        ([3], [[1.0]]),
        ([3, 4, 5], [[1.0], [2.0], [0.0]]),
        ([3, 3], [[1.0], [1.0]]),
        ([4, 3], [[1.0], [2.0]]),
    ):
        with pytest.raises(AssertionError):
            judge.assert_same_table(np.array(keys), np.array(rows), expected)
