import numpy as np
import pytest
import tensorflow as tf

from tests.messages import saying
from tests.ops.shapes import SEGMENT_SIZES, make_segments
from tests.reference import combine, sparse_update
from tests.reference.judge import assert_close, assert_same

NO_WEIGHTS = np.zeros(0, np.float32)


def make_case(rng, *size, weighted):
    rows, index, splits = make_segments(rng, *size)
    weights = rng.uniform(0.1, 2.0, len(index)).astype(np.float32) if weighted else NO_WEIGHTS
    return rows, index, splits, weights


@pytest.mark.parametrize("combiner", combine.COMBINERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("size", SEGMENT_SIZES)
def test_pooled_rows_and_gradients_agree_with_numpy(lib, call, rng, combiner, weighted, size):
    rows, index, splits, weights = make_case(rng, *SEGMENT_SIZES[size], weighted=weighted)
    upstream = rng.normal(size=(len(splits) - 1, rows.shape[1])).astype(np.float32)

    def step(rows, weights):
        with tf.GradientTape() as tape:
            tape.watch([rows, weights])
            output = lib.sok_combine(rows, index, splits, weights, combiner=combiner)
            loss = tf.reduce_sum(output * upstream)
        return output, *tape.gradient(loss, [rows, weights])

    output, grad_rows, grad_weights = call(step, tf.constant(rows), tf.constant(weights))
    # Addends of size 1 may cancel, up to some hundred per row.
    assert_close(output, combine.combine(rows, index, splits, weights, combiner), scale=10)
    expected = combine.combine_grad_rows(upstream, index, splits, weights, len(rows), combiner)
    assert_close(grad_rows, expected, scale=10)
    if weighted:
        expected = combine.combine_grad_weights(upstream, rows, index, splits, weights, combiner)
        assert_close(grad_weights, expected, scale=20)
    else:
        assert grad_weights.shape == [0]


@pytest.mark.parametrize("combiner", combine.COMBINERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_pooled_rows_agree_with_embedding_lookup_sparse(lib, rng, combiner, weighted):
    rows, index, splits, weights = make_case(rng, 50, 12, 9, 4, weighted=weighted)
    segment = np.repeat(np.arange(12), np.diff(splits))
    places = np.stack([segment, np.arange(50) - splits[segment]], axis=1)
    ids = tf.SparseTensor(places, index, [12, 50])
    theirs = tf.nn.embedding_lookup_sparse(
        rows, ids, tf.SparseTensor(places, weights, [12, 50]) if weighted else None, combiner=combiner
    ).numpy()
    ours = lib.sok_combine(rows, index, splits, weights, combiner=combiner).numpy()
    # tf.nn leaves trailing empty segments out.
    assert_close(ours[: len(theirs)], theirs, scale=10)
    assert not ours[len(theirs) :].any()


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_that_cancel_give_zeros_and_no_gradient(lib, combiner):
    weights = tf.constant([0.0, 0.0] if combiner == "sqrtn" else [1.0, -1.0])
    rows = tf.constant([[1.0], [2.0]])
    with tf.GradientTape() as tape:
        tape.watch([rows, weights])
        output = lib.sok_combine(rows, [0, 1], [0, 2], weights, combiner=combiner)
    assert_same(output, [[0.0]])
    grad_rows, grad_weights = tape.gradient(output, [rows, weights])
    assert_same(grad_rows, [[0.0], [0.0]])
    assert_same(grad_weights, [0.0, 0.0])


@pytest.mark.parametrize("combiner", combine.COMBINERS)
def test_gradients_agree_with_differences(lib, rng, combiner):
    rows, index, splits, weights = make_case(rng, 7, 4, 5, 2, weighted=True)
    # Float32 differences of step 1e-2: the error of the method is about 1e-4.
    for f, x in (
        (lambda rows: lib.sok_combine(rows, index, splits, weights, combiner=combiner), rows),
        (lambda weights: lib.sok_combine(rows, index, splits, weights, combiner=combiner), weights),
    ):
        theory, numeric = tf.test.compute_gradient(f, [tf.constant(x)], delta=1e-2)
        np.testing.assert_allclose(theory[0], numeric[0], atol=5e-3)


@pytest.mark.parametrize("combiner", combine.COMBINERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("size", ["no_segments", "no_ids", "mixed", "split_over_threads"])
def test_sparse_gradient_is_summed_per_row(lib, rng, combiner, weighted, size):
    _, index, splits, weights = make_case(rng, *SEGMENT_SIZES[size], weighted=weighted)
    row_ids = np.where(index % 5 == 3, -1, index)
    grad = rng.normal(size=(len(splits) - 1, 6)).astype(np.float32)
    (got_ids,), (got_sums,) = lib.sok_group_lookup_grad(
        [grad],
        [tf.constant(row_ids, tf.int64)],
        [tf.constant(splits, tf.int64)],
        [weights],
        M=1,
        table_of=[0],
        dims=[6],
        combiners=[combiner],
    )
    ids, sums = sparse_update.combine_grad_sparse(grad, row_ids, splits, weights, combiner)
    assert_same(got_ids, ids)
    assert_close(got_sums, sums, scale=10)


def test_shapes_are_inferred(lib):
    with tf.Graph().as_default():
        p = tf.compat.v1.placeholder
        rows, weights = p(tf.float32, [None, 5]), p(tf.float32, [None])
        assert lib.sok_combine(rows, p(tf.int64, [9]), p(tf.int64, [4]), weights, combiner="sum").shape == [3, 5]
        unknown = lib.sok_combine(rows, p(tf.int64, [9]), p(tf.int64, [None]), weights, combiner="sum")
        assert unknown.shape.as_list() == [None, 5]
        grad_rows = lib.sok_combine_grad_rows(rows, p(tf.int64, [9]), p(tf.int64, [4]), weights, 8, combiner="sum")
        assert grad_rows.shape == [8, 5]
        with pytest.raises(ValueError, match="rank 2"):
            lib.sok_combine(weights, p(tf.int64, [9]), p(tf.int64, [4]), weights, combiner="sum")


GOOD = {"rows": np.zeros((3, 2), np.float32), "index": [0, 2], "row_splits": [0, 1, 2], "weights": NO_WEIGHTS}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"index": [0, 3]}, r"index\[1\] = 3 must lie in \[0, 3\)"),
        ({"index": [-1, 0]}, r"index\[0\] = -1 must lie in \[0, 3\)"),
        ({"row_splits": [1, 1, 2]}, "`row_splits` must start with 0"),
        ({"row_splits": np.zeros(0, np.int64)}, "`row_splits` must start with 0"),
        ({"row_splits": [0, 2, 1, 2]}, "`row_splits` must not fall.*2 then 1 at 2"),
        ({"row_splits": [0, 1]}, "`row_splits` must end with .*2.*: 1"),
        ({"row_splits": [[0, 2]]}, "`row_splits` must have rank 1"),
        ({"weights": [1.0]}, r"`weights` .*per key \(2\).*: 1"),
        ({"weights": [[1.0, 2.0]]}, "`weights` must have rank 1"),
        ({"rows": np.zeros(3, np.float32)}, "`rows` must have rank 2"),
        ({"index": [[0, 2]]}, "`index` must have rank 1"),
    ],
)
def test_bad_arguments_are_named(lib, change, text):
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        lib.sok_combine(**(GOOD | change), combiner="sum")


def test_other_combiners_are_refused(lib):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="max"):
        lib.sok_combine(**GOOD, combiner="max")


def test_gradient_ops_check_their_arguments(lib):
    grad, index, splits = np.zeros((2, 2), np.float32), [0, 1], [0, 1, 2]
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("index[1] = 1", "lie in [0, 1)")):
        lib.sok_combine_grad_rows(grad, index, splits, NO_WEIGHTS, 1, combiner="sum")
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`grad`", "shape [2,2]", "Received: [1,2]")):
        lib.sok_combine_grad_rows(grad[:1], index, splits, NO_WEIGHTS, 2, combiner="sum")
    group = {"table_of": [0], "dims": [2], "combiners": ["sum"]}
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`grad`", "shape [2,2]", "Received: [1,2]")):
        lib.sok_group_lookup_grad(
            [grad[:1]], [tf.constant(index, tf.int64)], [tf.constant(splits, tf.int64)], [NO_WEIGHTS], M=1, **group
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("index[1] = 1", "lie in [0, 1)")):
        lib.sok_combine_grad_weights(grad, grad[:1], index, splits, [1.0, 1.0], combiner="sum")


@pytest.mark.parametrize("num_rows", [-1, 2**62])
def test_gradient_for_an_absurd_number_of_rows_is_an_error(lib, num_rows):
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError)):
        none = np.zeros(0, np.int64)
        lib.sok_combine_grad_rows(
            np.zeros((0, 4), np.float32), none, [0], NO_WEIGHTS, tf.constant(num_rows, tf.int64), combiner="sum"
        )
