"""Ops without a table, and ordinary variables, on a GPU: the tests of the CPU's ops, run there, and what differs."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import _ops
from tests.ops import test_combine as combine_cases
from tests.ops import test_segment_sum as segment_sum_cases
from tests.ops import test_unique as unique_cases
from tests.ops import test_variable_pool as pool_cases
from tests.ops.shapes import report
from tests.reference.judge import assert_close, assert_same

from .conftest import GPU

COMBINERS = ("sum", "mean", "sqrtn")

# These run once more, with all their cases, as tests of this file.
test_pooling = combine_cases.test_pooled_rows_and_gradients_agree_with_numpy
test_pooling_as_tensorflow = combine_cases.test_pooled_rows_agree_with_embedding_lookup_sparse
test_weights_that_cancel = combine_cases.test_weights_that_cancel_give_zeros_and_no_gradient
test_gradients_agree_with_differences = combine_cases.test_gradients_agree_with_differences
test_sums = segment_sum_cases.test_sums_agree_with_numpy
test_many_sums = segment_sum_cases.test_sums_split_over_threads_agree_with_tensorflow
test_sums_of_half_precision = segment_sum_cases.test_sums_of_half_precision_keep_small_addends
test_sums_repeat = segment_sum_cases.test_sums_repeat_bit_for_bit
test_gradient_of_sums = segment_sum_cases.test_gradient_gathers
test_unique = unique_cases.test_unique_gives_first_appearances_places_and_counts
test_unique_as_tensorflow = unique_cases.test_unique_agrees_with_tensorflow
test_variable_pools = pool_cases.test_pooled_rows_and_gradients_agree_with_numpy
test_rows_as_they_are = pool_cases.test_rows_come_as_they_are
test_wrong_gradient = pool_cases.test_a_gradient_of_the_wrong_shape_is_refused
test_ids_for_stock_ops = pool_cases.test_ids_for_stock_ops_are_checked


@pytest.fixture(scope="session")
def lib():
    return _ops.lib()


@pytest.fixture(autouse=True)
def on_the_gpu():
    sok.Init()
    with tf.device(GPU):
        yield


def int64(*values):
    return tf.constant(values, tf.int64)


POOL = {"names": ["v"], "num_rows": [3], "dims": [2], "variable_of": [0], "combiners": ["sum"]}


def calls(lib):
    rows, weights, splits = tf.ones([3, 2]), tf.ones([2]), int64(0, 1, 2)
    index, grad = int64(0, 2), tf.ones([2, 2])
    variable = tf.Variable(rows)
    yield "Combine", lib.sok_combine(rows, index, splits, weights, combiner="sum")
    yield "CombineGradRows", lib.sok_combine_grad_rows(grad, index, splits, weights, 3, combiner="sum")
    yield "CombineGradWeights", lib.sok_combine_grad_weights(grad, rows, index, splits, weights, combiner="sum")
    yield "Unique", lib.sok_unique(index)[0]
    yield "UnsortedSegmentSum", lib.sok_unsorted_segment_sum(grad, index, 3)
    yield "VariablePool", lib.sok_variable_pool([variable.handle], [index], [splits], **POOL)[0]
    yield "TensorPool", lib.sok_tensor_pool([rows], [index], [splits], **POOL)[0]
    yield "VariablePoolGrad", lib.sok_variable_pool_grad([grad], [index], [splits], M=1, **POOL)[0][0]
    yield "CheckIds", lib.sok_check_ids(index, splits, variable="v", num_rows=3)


def test_each_op_runs_on_the_gpu(lib):
    for name, output in calls(lib):
        assert output.device.endswith("GPU:0"), name


@pytest.mark.parametrize("out_idx", [tf.int32, tf.int64])
@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_unique_without_counts(lib, dtype, out_idx):
    y, idx, counts = lib.sok_unique(np.array([5, 5, 0, 5], dtype), out_idx=out_idx, with_counts=False)
    assert_same(y, np.array([5, 0], dtype))
    assert_same(idx, [0, 0, 1, 0])
    assert idx.dtype == counts.dtype == out_idx and counts.shape == [0]


# ---- What cannot be raised without a wait for the device is left out.


def test_indices_that_are_no_rows_read_as_zeros(lib):
    rows, splits, no_weights = tf.constant([[1.0], [10.0]]), int64(0, 1, 3), tf.zeros([0])
    index = int64(5, 1, -1)
    assert_same(lib.sok_combine(rows, index, splits, no_weights, combiner="sum"), [[0.0], [10.0]])
    grad = tf.constant([[1.0], [2.0]])
    assert_same(lib.sok_combine_grad_rows(grad, index, splits, no_weights, 2, combiner="sum"), [[0.0], [2.0]])
    weights = tf.ones([3])
    of_weights = lib.sok_combine_grad_weights(grad, rows, index, splits, weights, combiner="sum")
    assert_same(of_weights, [0.0, 20.0, 0.0])


@pytest.mark.parametrize("splits", [[0, 2, 1], [0, 7], [-3, 7], report(5, 7)], ids=str)
def test_splits_that_make_no_sense_give_zeros(lib, splits):
    out = lib.sok_combine([[1.0]], int64(0, 0), tf.constant(splits, tf.int64), tf.zeros([0]), combiner="sum")
    assert_same(out[-1], [0.0])


def test_segments_that_are_not_there_are_left_out_of_sums(lib):
    for dtype in segment_sum_cases.DTYPES:
        sums = lib.sok_unsorted_segment_sum(tf.constant([1, 2, 4], dtype), [0, 9, -1], 2)
        assert_same(tf.cast(sums, tf.float32), [1.0, 0.0])


@pytest.mark.parametrize(
    ("ids", "splits", "message"),
    [
        ([1, 4], [0, 1, 2], r"variable 'v0': id 4 is outside \[0, 4\)"),
        ([-1, 1], [0, 1, 2], r"variable 'v0': id -1 is outside \[0, 4\)"),
        ([2**32 + 1, 1], [0, 1, 2], r"variable 'v0': id 4294967297 is outside \[0, 4\)"),
        ([1, 2], [0, 2, 1], "variable 'v0': `row_splits` must not fall"),
        ([1, 2], [0, 1], "`row_splits` must end with .*2"),
        ([1, 2], report(5, 7), "'v0': .*key number 7"),
    ],
)
def test_the_gradient_of_a_pool_names_bad_input(lib, ids, splits, message):
    rows = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    options = pool_cases.attributes([rows], ["sum"], [0])
    ids, splits = tf.constant(ids, tf.int64), tf.constant(splits, tf.int64)
    (out,) = lib.sok_tensor_pool([rows], [ids], [splits], **options)
    if len(splits) == 3 and splits[1] == 1:
        assert_same(out, [rows[i] if 0 <= i < 4 else [0, 0] for i in ids])
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        lib.sok_variable_pool_grad([tf.ones_like(out)], [ids], [splits], M=1, **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [[1, 2]]}, tf.errors.InvalidArgumentError, "variable 'v0': `ids` must have rank 1"),
        ({"splits": []}, tf.errors.InvalidArgumentError, "variable 'v0': `row_splits` must start with 0"),
        ({"options": {"dims": [2]}}, tf.errors.InvalidArgumentError, r"its shape must be \[4,2\]. Received: \[4,3\]"),
        ({"options": {"dims": [-3]}}, tf.errors.InvalidArgumentError, r"`dims` must lie in \[0, 2\^31\)"),
        ({"variable": np.ones([4, 3])}, tf.errors.InvalidArgumentError, "variable 'v0': it must be float32"),
    ],
)
def test_misuse_of_a_pool(lib, change, error, message):
    pool_cases.test_misuse(lib, change, error, message)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"row_splits": np.zeros(0, np.int64)}, "`row_splits` must start with 0"),
        ({"row_splits": [[0, 2]]}, "`row_splits` must have rank 1"),
        ({"weights": [1.0]}, r"`weights` .*per key \(2\).*Received: 1"),
        ({"rows": np.zeros(3, np.float32)}, "`rows` must have rank 2"),
        ({"index": [[0, 2]]}, "`index` must have rank 1"),
    ],
)
def test_bad_arguments_of_pooling_are_named(lib, change, text):
    combine_cases.test_bad_arguments_are_named(lib, change, text)


def test_a_variable_without_columns(lib):
    options = pool_cases.attributes([np.zeros([4, 0])], ["mean"], [0])
    ids, splits = int64(3, 1, 3), int64(0, 2, 3)
    (out,) = lib.sok_tensor_pool([tf.zeros([4, 0])], [ids], [splits], **options)
    assert out.shape == [2, 0]
    (unique,), (sums,) = lib.sok_variable_pool_grad([out], [ids], [splits], M=1, **options)
    assert_same(unique, [1, 3])
    assert sums.shape == [2, 0]


# ---- Group lookups


def ragged(rng, high, n=40, segments=12):
    inner = np.sort(rng.integers(0, n + 1, segments - 1))
    return rng.integers(0, high, n), np.concatenate([[0], inner, [n]])


def step_of(lookup, sources, weights):
    """Outputs, and the gradients of some loss in sources and weights: those of the sources as matrices [200, dim]."""

    def step(*weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = lookup(weights)
            loss = tf.add_n([tf.reduce_sum(tf.sin(o)) for o in outputs])
        of_sources, of_weights = tape.gradient(loss, [sources, list(weights)])
        return outputs, [(g.values, g.indices) for g in of_sources], of_weights

    def matrices(outputs, slices, of_weights):
        found = []
        for values, indices in slices:
            found.append(np.zeros([200, values.shape[1]], np.float32))
            np.add.at(found[-1], indices.numpy() & 0xFFFFFFFF, values.numpy())  # row ids: the lower half
        return outputs, found, of_weights

    return lambda call: matrices(*call(step, *map(tf.constant, weights)))


DIMS = (4, 7, 1)


@pytest.fixture
def features(rng):
    return [ragged(rng, 200) for _ in DIMS]


@pytest.fixture
def weights(rng):
    return [rng.uniform(0.5, 2, 40).astype(np.float32) for _ in DIMS]


def check_both_devices(call, run):
    found = []
    for device in (GPU, "/CPU:0"):
        with tf.device(device):
            found.append(run(device)(call))
    for ours, expected in zip(*found, strict=True):
        for a, b in zip(ours, expected, strict=True):
            assert_close(a, b, scale=10)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_variables_are_looked_up_as_on_the_cpu(call, rng, features, weights, weighted):
    values = [rng.normal(size=(200, d)).astype(np.float32) for d in DIMS]

    def run(device):
        variables = [tf.Variable(v) for v in values]
        assert all(device.strip("/") in v.handle.device for v in variables)
        ids = [tf.RaggedTensor.from_row_splits(i, s) for i, s in features]

        def lookup(weights):
            sp_weights = [i.with_values(w) for i, w in zip(ids, weights, strict=True)] if weights else None
            return sok.group_embedding_lookup_sparse(variables, ids, list(COMBINERS), sp_weights=sp_weights)

        return step_of(lookup, variables, weights if weighted else [])

    check_both_devices(call, run)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("insert", [False, True], ids=["unseen", "inserted"])
def test_gradients_in_weights_are_those_of_the_cpu(lib, call, features, weights, insert, hashed):
    """The weights of the third feature are none, which has no gradient."""

    def run(_):
        tables = [sok.EmbeddingVariable(d, 200, hashed=hashed, seed=d, name="stateless") for d in DIMS]
        keys, splits = ([tf.constant(f[i]) for f in features] for i in range(2))
        options = {"table_of": [0, 1, 2], "dims": list(DIMS), "combiners": list(COMBINERS)}

        def step(*weights):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                handles = [t.handle for t in tables]
                given = [*weights, tf.zeros([0])]
                outputs, _ = lib.sok_group_lookup(handles, keys, splits, given, insert, **options)
                loss = tf.add_n([tf.reduce_sum(tf.sin(o)) for o in outputs])
            return outputs, tape.gradient(loss, list(weights))

        return lambda call: call(step, *map(tf.constant, weights[:2]))

    check_both_devices(call, run)


def test_variables_of_two_devices_in_one_group(call):
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    here = tf.Variable(values)
    with tf.device("/CPU:0"):
        there = tf.Variable(values + 10)
    ids = tf.constant([0, 2], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            rows = sok.group_embedding_lookup([here, there, here], [ids, ids, ids])
            loss = tf.add_n([tf.reduce_sum(r) for r in rows])
        return rows, [tf.convert_to_tensor(g) for g in tape.gradient(loss, [here, there])]

    rows, (of_here, of_there) = call(step)
    for got, expected in zip(rows, (values, values + 10, values), strict=True):
        assert_same(got, expected[[0, 2]])
    assert_same(of_here, [[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]])
    assert_same(of_there, [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])


def test_ordinary_variables_train_as_on_the_cpu(call, rng):
    values = rng.normal(size=(50, 6)).astype(np.float32)
    features = [ragged(rng, 50) for _ in range(3)]
    rows = []
    for device in (GPU, "/CPU:0"):
        with tf.device(device):
            variable = tf.Variable(values)

            def step(ids, splits, variable=variable):
                with tf.GradientTape() as tape:
                    ids = tf.RaggedTensor.from_row_splits(ids, splits)
                    out = sok.group_embedding_lookup_sparse([variable], [ids], ["mean"])[0]
                    loss = tf.reduce_sum(out * out)
                variable.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, variable)))

            for ids, splits in features:
                call(step, tf.constant(ids), tf.constant(splits))
            rows.append(variable.numpy())
    assert_close(rows[0], rows[1], scale=10)
    assert np.abs(rows[0] - values).max() > 0.01
