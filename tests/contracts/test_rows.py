"""Sums, pooling and updates of rows: what any backend must answer."""

import numpy as np
import pytest

from tests.messages import saying
from tests.reference import combine as combine_reference
from tests.reference import optimizers
from tests.reference.segment_sum import unsorted_segment_sum
from tests.reference.sparse_update import combine_grad_sparse, sum_duplicates

HYPER = {
    "sgd": [0.5],
    "adagrad": [0.1, 0.2, 1e-7],
    "lazy_adam": [0.01, 0.9, 0.999, 1e-7],
    "adam": [0.01, 0.9, 0.999, 1e-7],
}
SLOTS = {"sgd": 0, "adagrad": 1, "lazy_adam": 2, "adam": 2}


def splits_of(rng: np.random.Generator, segments: int) -> np.ndarray:
    """Empty, short and long segments."""
    lengths = rng.integers(0, 5, segments)
    lengths[:: max(1, segments // 3)] = 40
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@pytest.mark.sanitize
@pytest.mark.parametrize("dim", [1, 3, 16, 65])
@pytest.mark.parametrize("n", [0, 1, 33, 600])
@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
def test_segment_sums_are_those_of_the_statement(backend, rng, n, dim, ids_dtype):
    data = rng.integers(-8, 8, (n, dim)).astype(np.float32)  # exact in any order
    ids = np.where(rng.random(n) < 0.5, 3, rng.integers(-1, 7, n)).astype(ids_dtype)
    np.testing.assert_array_equal(backend.segment_sum(data, ids, 7), unsorted_segment_sum(data, ids, 7))


@pytest.mark.parametrize("deterministic", [True, False])
def test_segment_sums_of_16_bits_are_taken_in_float32(cuda, rng, deterministic):
    data = rng.integers(-8, 8, (500, 5)).astype(np.float32)
    ids = rng.integers(-1, 3, 500)
    expected = unsorted_segment_sum(data, ids, 3)
    for given in (data.astype(np.float16), (data.view(np.uint32) >> 16).astype(np.uint16)):
        np.testing.assert_array_equal(cuda.segment_sum(given, ids, 3, deterministic=deterministic), expected)


def test_deterministic_segment_sums_repeat_bit_for_bit(cuda, rng):
    data = rng.standard_normal((4000, 3)).astype(np.float32)
    ids = rng.integers(0, 2, 4000)
    first = cuda.segment_sum(data, ids, 2)
    for _ in range(2):
        np.testing.assert_array_equal(cuda.segment_sum(data, ids, 2), first)
    np.testing.assert_allclose(first, unsorted_segment_sum(data, ids, 2), rtol=1e-5, atol=1e-4)


@pytest.mark.sanitize
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 6, 64])
def test_rows_are_pooled_by_the_rules_of_tf_nn(backend, rng, dim, combiner, weighted):
    splits = splits_of(rng, 60)
    index = rng.integers(0, 30, splits[-1])
    rows = rng.standard_normal((30, dim)).astype(np.float32)
    weights = rng.random(splits[-1]).astype(np.float32) if weighted else None
    got = backend.combine(rows, index, splits, weights, combiner)
    np.testing.assert_allclose(got, combine_reference.combine(rows, index, splits, weights, combiner), 1e-5, 1e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 6, 65])
def test_gradients_of_pooling_are_those_of_the_statement(backend, rng, dim, combiner, weighted):
    splits = splits_of(rng, 60)
    index = rng.integers(0, 30, splits[-1])
    rows, grad = (rng.standard_normal((n, dim)).astype(np.float32) for n in (30, 60))
    weights = (0.1 + rng.random(splits[-1])).astype(np.float32)
    got = backend.combine_grad_rows(grad, index, splits, weights if weighted else None, 30, combiner)
    expected = combine_reference.combine_grad_rows(grad, index, splits, weights if weighted else None, 30, combiner)
    np.testing.assert_allclose(got, expected, 1e-5, 1e-4)
    if weighted:
        got = backend.combine_grad_weights(grad, rows, index, splits, weights, combiner)
        expected = combine_reference.combine_grad_weights(grad, rows, index, splits, weights, combiner)
        np.testing.assert_allclose(got, expected, 1e-4, 1e-4)  # a dot product, and a difference of two


def test_gradients_of_no_positions_are_zeros(backend):
    none, no_index = np.zeros((0, 3), np.float32), np.zeros(0, np.int64)
    got = backend.combine_grad_rows(none, no_index, np.zeros(1, np.int64), None, 4, "mean")
    np.testing.assert_array_equal(got, np.zeros((4, 3)))
    got = backend.combine_grad_weights(none, none, no_index, np.zeros(1, np.int64), np.zeros(0, np.float32), "mean")
    assert got.shape == (0,)


def test_gradients_of_pooling_name_what_does_not_fit(cuda):
    import sok.cuda
    from sok.cuda import _arrays

    put = cuda.put
    grad, index, weights = put(np.ones((3, 2), np.float32)), put(np.array([0, 5, 1])), put(np.ones(3, np.float32))
    bad = _arrays.none_bad()
    got = sok.cuda.combine_grad_rows(grad, index, num_rows=2, first_bad=bad)
    np.testing.assert_array_equal(cuda.get(got), np.ones((2, 2)))
    assert int(cuda.get(bad)[0]) == 1
    rows = put(np.ones((2, 2), np.float32))
    got = sok.cuda.combine_grad_weights(grad, rows, index, weights=weights, combiner="sum")
    np.testing.assert_array_equal(cuda.get(got), [2, 0, 2])
    with pytest.raises(ValueError, match=saying("`grad`", "row for each of 1 segments", "Received: 3")):
        sok.cuda.combine_grad_rows(grad, index, hotness=3, num_rows=2)
    with pytest.raises(ValueError, match=saying("`rows`", "2 columns of `grad`", "Received: 1")):
        sok.cuda.combine_grad_weights(grad, put(np.ones((2, 1), np.float32)), index, weights=weights)
    with pytest.raises(ValueError, match=saying("`combiner`")):
        sok.cuda.combine_grad_rows(grad, index, num_rows=2, combiner="max")


def test_pooled_rows_in_16_bits_are_rounded_once(cuda, rng):
    splits = splits_of(rng, 20)
    index = rng.integers(0, 9, splits[-1])
    rows = rng.standard_normal((9, 5)).astype(np.float32)
    exact = cuda.combine(rows, index, splits, None, "mean")
    np.testing.assert_array_equal(cuda.combine(rows, index, splits, None, "mean", "float16"), exact.astype(np.float16))
    words = cuda.combine(rows, index, splits, None, "mean", "bfloat16")
    brain = (words.astype(np.uint32) << 16).view(np.float32)
    assert np.all(np.abs(brain - exact) <= np.abs(exact) * 2.0**-8)


def test_a_group_of_features_gives_columns_of_one_matrix(cuda, rng):
    import sok.cuda

    tables = [rng.standard_normal((20, dim)).astype(np.float32) for dim in (3, 8)]
    one, two = rng.integers(0, 20, 40), rng.integers(-1, 20, 120)
    outputs = sok.cuda.combine_group(
        [
            sok.cuda.Feature(*map(cuda.put, (tables[0], one))),
            sok.cuda.Feature(*map(cuda.put, (tables[1], two)), hotness=3),
        ]
    )
    assert outputs[0].base is outputs[1].base
    np.testing.assert_array_equal(cuda.get(outputs[0]), tables[0][one])
    padded = np.concatenate([tables[1], np.zeros((1, 8), np.float32)])  # -1 reads as zeros
    np.testing.assert_allclose(cuda.get(outputs[1]), padded[two].reshape(40, 3, 8).sum(1), 1e-5, 1e-6)


def test_indices_that_are_not_there_are_zeros_and_reported(cuda):
    import sok.cuda
    from sok.cuda import _arrays

    bad = _arrays.none_bad()
    out = sok.cuda.combine(cuda.put(np.ones((2, 3), np.float32)), cuda.put(np.array([1, 0, 2])), first_bad=bad)
    np.testing.assert_array_equal(cuda.get(out)[:, 0], [1, 1, 0])
    assert int(cuda.get(bad)[0]) == 2


@pytest.mark.parametrize("n", [0, 1, 700])
def test_gradients_of_equal_rows_are_summed(backend, rng, n):
    row_ids = rng.integers(-1, 50, n)
    values = rng.integers(-8, 8, (n, 6)).astype(np.float32)
    got_ids, got = backend.sum_rows(row_ids, values, 50)
    expected_ids, expected = sum_duplicates(row_ids, values)
    order = np.argsort(got_ids)
    by_id = np.argsort(expected_ids)
    np.testing.assert_array_equal(got_ids[order], expected_ids[by_id])
    np.testing.assert_array_equal(got[order], expected[by_id])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_gradients_of_pooled_rows_of_two_tables_are_summed_at_once(cuda, rng, combiner):
    import sok.cuda

    splits = splits_of(rng, 30)
    row_ids = rng.integers(-1, 12, splits[-1])
    weights = rng.random(splits[-1]).astype(np.float32)
    grad, plain = (rng.standard_normal((s, 4)).astype(np.float32) for s in (30, 9))
    ids_of_plain = rng.integers(0, 5, 9)
    put = cuda.put
    sums = sok.cuda.sum_rows(
        [
            sok.cuda.Addends(put(row_ids), put(grad), 1, put(splits), weights=put(weights), combiner=combiner),
            sok.cuda.Addends(put(ids_of_plain), put(plain), 0),
        ],
        [5, 12],
    )
    n = int(cuda.get(sums.num_sums)[0])
    tables, ids, values = (cuda.get(x)[:n] for x in sums[:3])
    pooled_ids, pooled = combine_grad_sparse(grad, row_ids, splits, weights, combiner)
    plain_ids, plain_sums = sum_duplicates(ids_of_plain, plain)
    for table, expected_ids, expected in ((0, plain_ids, plain_sums), (1, pooled_ids, pooled)):
        order = np.argsort(expected_ids)
        np.testing.assert_array_equal(ids[tables == table], expected_ids[order])
        np.testing.assert_allclose(values[tables == table], expected[order], 1e-5, 1e-5)


def statement(rule: str, state: list[np.ndarray], grads: np.ndarray, step: int) -> list[np.ndarray]:
    """One call on all rows [rows, D]; a row without a gradient has zeros."""
    hyper = HYPER[rule]
    if rule == "sgd":
        return [optimizers.sgd(state[0], grads, hyper[0])]
    if rule == "adagrad":
        return list(optimizers.adagrad(*state, grads, hyper[0], hyper[2]))
    touched = np.any(grads != 0, axis=1, keepdims=True) if rule == "lazy_adam" else np.array(True)
    return [
        np.where(touched, new, old)
        for new, old in zip(optimizers.adam(*state, grads, *hyper, step), state, strict=True)
    ]


@pytest.mark.parametrize("rule", list(HYPER))
@pytest.mark.parametrize("dim", [1, 8, 33])
def test_rules_move_rows_as_stated(cuda, rng, rule, dim):
    import sok.cuda

    rows, offset = 20, dim + 2  # two floats of somebody else's in between
    records = rng.standard_normal((rows, offset + SLOTS[rule] * dim)).astype(np.float32)
    records[:, offset:] = 0.2 if rule == "adagrad" else 0.0
    on_device = cuda.put(records.copy())
    decay = sok.cuda.Decay(rows) if rule == "adam" else None
    table = sok.cuda.Records(on_device, offset, decay)
    state = [records[:, :dim].astype(np.float64)]
    state += [records[:, offset + k * dim : offset + (k + 1) * dim].astype(np.float64) for k in range(SLOTS[rule])]
    for step in range(1, 6):
        row_ids = rng.permutation(rows)[:7]
        grads = rng.standard_normal((7, dim)).astype(np.float32)
        sok.cuda.update_rows(rule, HYPER[rule], [table], cuda.put(row_ids), cuda.put(grads), step=step, grad_scale=0.5)
        dense = np.zeros((rows, dim))
        dense[row_ids] = 0.5 * grads.astype(np.float64)
        state = statement(rule, state, dense, step)
    if rule == "adam":
        sok.cuda.settle_rows(rule, HYPER[rule], table, cuda.put(np.arange(rows)), dim, step=5)
    got = cuda.get(on_device)
    np.testing.assert_array_equal(got[:, dim:offset], records[:, dim:offset])
    np.testing.assert_allclose(got[:, :dim], state[0], rtol=2e-5, atol=2e-6)
    for k in range(SLOTS[rule]):
        np.testing.assert_allclose(
            got[:, offset + k * dim : offset + (k + 1) * dim], state[k + 1], rtol=2e-5, atol=2e-6
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_skipped_or_raised(cuda, bad):
    import sok.cuda
    from sok.cuda import _arrays

    grads = np.ones((3, 2), np.float32)
    grads[1, 1] = bad
    row_ids = cuda.put(np.array([4, 0, 2]))
    for mode, moved in (("skip", [2, 4]), ("raise", [])):
        records = cuda.put(np.zeros((5, 2), np.float32))
        first_bad = _arrays.none_bad()
        table = sok.cuda.Records(records)
        sok.cuda.update_rows("sgd", [1.0], [table], row_ids, cuda.put(grads), nonfinite=mode, first_bad=first_bad)
        np.testing.assert_array_equal(np.flatnonzero(cuda.get(records)[:, 0]), moved)
        if mode == "raise":
            with pytest.raises(ValueError, match=saying("position 1", "of row id 0", "holds NaN or infinity")):
                sok.cuda.check(first_bad, row_ids)


def test_a_refused_call_of_adam_does_not_count(cuda):
    import sok.cuda
    from sok.cuda import _arrays

    records = cuda.put(np.ones((3, 6), np.float32))
    table = sok.cuda.Records(records, 2, sok.cuda.Decay(3))
    grads, row_ids = cuda.put(np.array([[np.nan, 1]], np.float32)), cuda.put(np.array([1]))
    with pytest.raises(ValueError, match="position 0, of row id 1"):
        sok.cuda.update_rows(
            "adam", HYPER["adam"], [table], row_ids, grads, nonfinite="raise", first_bad=_arrays.none_bad()
        )
    sok.cuda.settle_rows("adam", HYPER["adam"], table, cuda.put(np.arange(3)), 2)
    np.testing.assert_array_equal(cuda.get(records), np.ones((3, 6)))


def test_bad_arguments_are_named(cuda):
    import sok.cuda

    put = cuda.put
    rows, index = put(np.ones((4, 2), np.float32)), put(np.arange(3))
    with pytest.raises(ValueError, match=saying("`combiner`", "Received: 'max'")):
        sok.cuda.combine(rows, index, combiner="max")
    with pytest.raises(ValueError, match=saying("`hotness`", "at least 1 and divide the 3 positions", "Received: 2")):
        sok.cuda.combine(rows, index, hotness=2)
    with pytest.raises(ValueError, match=saying("`features[0].weights`", "shape [3]", "Received: [2]")):
        sok.cuda.combine(rows, index, weights=put(np.ones(2, np.float32)))
    with pytest.raises(ValueError, match=saying("`dtype`", "Received: 'float64'")):
        sok.cuda.combine(rows, index, dtype="float64")
    with pytest.raises(ValueError, match=saying("`rule`", "Received: 'no_rule'")):
        sok.cuda.update_rows("no_rule", [1.0], [sok.cuda.Records(rows)], index, put(np.ones((3, 2), np.float32)))
    with pytest.raises(ValueError, match=saying("`tables[0].values`", "2 weights and from column 0 on 2 floats")):
        sok.cuda.update_rows(
            "adagrad", HYPER["adagrad"], [sok.cuda.Records(rows)], index, put(np.ones((3, 2), np.float32))
        )
    with pytest.raises(ValueError, match="needs `decay` and `stamps`"):
        wide = sok.cuda.Records(put(np.ones((4, 6), np.float32)), 2)
        sok.cuda.update_rows("adam", HYPER["adam"], [wide], index, put(np.ones((3, 2), np.float32)))
    with pytest.raises(ValueError, match=saying("row for each of 3 segments", "Received: 4")):
        sok.cuda.sum_rows([sok.cuda.Addends(index, rows)], [4])
    with pytest.raises(ValueError, match="table 1 is not one of the 1"):
        sok.cuda.sum_rows([sok.cuda.Addends(index, put(np.ones((3, 2), np.float32)), table=1)], [4])
    with pytest.raises(ValueError, match=saying("`num_segments`", "must not be negative")):
        sok.cuda.unsorted_segment_sum(rows, put(np.arange(4)), -1)
