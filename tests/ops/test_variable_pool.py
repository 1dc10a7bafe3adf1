"""`VariablePool`, `TensorPool` and `VariablePoolGrad`: against NumPy in all sizes, and what they refuse."""

import numpy as np
import pytest
import tensorflow as tf

from tests.messages import saying
from tests.ops.shapes import SEGMENT_SIZES, make_segments, report
from tests.reference import combine
from tests.reference.judge import assert_close

SIZES = SEGMENT_SIZES | {"split_over_threads": (50_000, 9_000, 300, 16), "wide": (2_000, 500, 300, 128)}


def attributes(rows, combiners, variable_of):
    return {
        "names": [f"v{i}" for i in range(len(rows))],
        "num_rows": [len(r) for r in rows],
        "dims": [r.shape[1] for r in rows],
        "variable_of": variable_of,
        "combiners": combiners,
    }


@pytest.mark.parametrize("by_handle", [True, False], ids=["resource", "tensor"])
@pytest.mark.parametrize("size", SIZES)
def test_pooled_rows_and_gradients_agree_with_numpy(lib, call, rng, size, by_handle):
    """Three features in two variables, the first used twice."""
    cases = [make_segments(rng, *SIZES[size]) for _ in range(3)]
    rows = [cases[0][0], cases[1][0]]
    variable_of, combiners = [0, 1, 0], ["sum", "mean", "sqrtn"]
    params = [tf.Variable(r) if by_handle else tf.constant(r) for r in rows]
    upstream = [rng.normal(size=(len(splits) - 1, rows[0].shape[1])).astype(np.float32) for _, _, splits in cases]

    def step():
        with tf.GradientTape() as tape:
            tape.watch(params)
            outputs = (lib.sok_variable_pool if by_handle else lib.sok_tensor_pool)(
                [p.handle for p in params] if by_handle else params,
                [ids for _, ids, _ in cases],
                [splits for _, _, splits in cases],
                **attributes(rows, combiners, variable_of),
            )
            loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(outputs, upstream, strict=True)])
        gradients = tape.gradient(loss, [p.handle for p in params] if by_handle else params)
        return outputs, [(g.indices, tf.convert_to_tensor(g)) for g in gradients]

    outputs, gradients = call(step)
    expected = [np.zeros(r.shape) for r in rows]
    for f, (_, ids, splits) in enumerate(cases):
        v = variable_of[f]
        assert_close(outputs[f], combine.combine(rows[v], ids, splits, None, combiners[f]), scale=100)
        expected[v] += combine.combine_grad_rows(upstream[f], ids, splits, None, len(rows[v]), combiners[f])
    for (indices, gradient), wanted in zip(gradients, expected, strict=True):
        assert len(set(indices.numpy().tolist())) == len(indices)
        assert_close(gradient, wanted, scale=100)


def test_rows_come_as_they_are(lib):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    options = attributes([rows], ["rows"], [0])
    for splits in ([], [0, 2, 2]):
        (out,) = lib.sok_tensor_pool([rows], [np.array([3, 0])], [np.array(splits, np.int64)], **options)
        np.testing.assert_array_equal(out, rows[[3, 0]])


GOOD = {"ids": [1, 2], "splits": [0, 1, 2], "variable": np.ones([4, 3], np.float32), "options": {}}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [1, 4]}, tf.errors.InvalidArgumentError, r"variable 'v0': id 4 is outside \[0, 4\)"),
        ({"ids": [-1, 1]}, tf.errors.InvalidArgumentError, r"variable 'v0': id -1 is outside \[0, 4\)"),
        ({"ids": [[1, 2]]}, tf.errors.InvalidArgumentError, "'v0': `ids` .*rank 1"),
        ({"splits": []}, tf.errors.InvalidArgumentError, "'v0': `row_splits` .*start with 0"),
        ({"splits": [0, 1]}, tf.errors.InvalidArgumentError, "`row_splits` must end with .*2"),
        ({"splits": [0, 2, 1]}, tf.errors.InvalidArgumentError, "'v0': `row_splits` .*fall"),
        ({"splits": [-3, 7]}, tf.errors.InvalidArgumentError, "'v0': `row_splits` .*start with 0"),
        ({"splits": report(5, 7)}, tf.errors.InvalidArgumentError, "'v0': .*key number 7"),
        ({"options": {"dims": [2]}}, tf.errors.InvalidArgumentError, r"its shape must be \[4,2\]. Received: \[4,3\]"),
        ({"options": {"num_rows": [3]}}, tf.errors.InvalidArgumentError, r"its shape must be \[3,3\]"),
        ({"options": {"num_rows": [2**31]}}, tf.errors.InvalidArgumentError, r"`num_rows` must lie in \[0, 2\^31\)"),
        ({"options": {"dims": [-3]}}, tf.errors.InvalidArgumentError, r"`dims` must lie in \[0, 2\^31\)"),
        ({"options": {"dims": [2**40]}}, tf.errors.InvalidArgumentError, r"`dims` must lie in \[0, 2\^31\)"),
        ({"options": {"names": []}}, tf.errors.InvalidArgumentError, "`names`, `num_rows` and `dims`"),
        ({"options": {"variable_of": [1]}}, tf.errors.InvalidArgumentError, r"`variable_of` must lie in \[0, 1\)"),
        ({"options": {"combiners": []}}, tf.errors.InvalidArgumentError, "`variable_of` and `combiners`"),
        ({"variable": np.ones([4, 3])}, tf.errors.InvalidArgumentError, "variable 'v0': it must be float32"),
    ],
)
def test_misuse(lib, change, error, message):
    case = GOOD | change
    options = attributes([GOOD["variable"]], ["sum"], [0]) | case["options"]
    variable = tf.Variable(case["variable"])
    with pytest.raises(error, match=message):
        lib.sok_variable_pool(
            [variable.handle], [np.array(case["ids"], np.int64)], [np.array(case["splits"], np.int64)], **options
        )


def test_a_gradient_of_the_wrong_shape_is_refused(lib):
    options = attributes([GOOD["variable"]], ["sum"], [0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`grads`", "shape [2,3]", "Received: [2,2]")):
        lib.sok_variable_pool_grad(
            [np.ones([2, 2], np.float32)], [np.array([1, 2])], [np.array([0, 1, 2])], M=1, **options
        )


def test_a_variable_without_a_value_is_named(lib):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", [4, 3], use_resource=True)
        options = attributes([GOOD["variable"]], ["sum"], [0])
        ids, splits = tf.constant([1], tf.int64), tf.constant([0, 1], tf.int64)
        out = lib.sok_variable_pool([variable.handle], [ids], [splits], **options)
        assert out[0].shape.as_list() == [1, 3]
        with pytest.raises(
            tf.errors.FailedPreconditionError, match=saying("variable 'v0'", "it has no value", "Run its ini")
        ):
            session.run(out)


@pytest.mark.parametrize("bad", [3, -1])
def test_ids_for_stock_ops_are_checked(lib, bad):
    ids, splits = np.array([0, 2]), np.array([0, 1, 2])
    np.testing.assert_array_equal(lib.sok_check_ids(ids, splits, variable="w", num_rows=3), ids)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"variable 'w': id {bad} is outside \[0, 3\)"):
        lib.sok_check_ids(np.array([0, bad]), splits, variable="w", num_rows=3)
