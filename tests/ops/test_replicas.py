"""What tells workers whether their variables are alike."""

import numpy as np
import pytest
import tensorflow as tf

from tests.messages import saying


def checksum(values) -> float:
    """The definition, byte by byte."""
    return float(sum((place % 4093) * int(byte) for place, byte in enumerate(values.tobytes(), 1)) % 4093)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_checksums_are_of_all_bytes_and_their_places(lib, call, rng, dtype):
    values = [tf.cast(rng.integers(0, 2 if dtype == "bool" else 50, n), dtype) for n in (1, 0, 7, 5000)]
    sums = call(lambda *values: lib.sok_checksums(values), *values)
    assert sums.numpy().tolist() == [checksum(one.numpy()) for one in values]


def test_what_has_changed_places_has_another_checksum(lib):
    a, b = lib.sok_checksums([tf.constant([1.0, 2.0]), tf.constant([2.0, 1.0])]).numpy()
    assert a != b


def test_a_checksum_is_of_numbers(lib):
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`values` must be numbers", "string")):
        lib.sok_checksums([tf.constant("text")])


def test_those_that_differ_are_named(lib, call):
    names = [f"v{i}" for i in range(12)]

    def check(is_same):
        with tf.control_dependencies(filter(None, [lib.sok_check_same(is_same, problem="Look:", names=names)])):
            return tf.reduce_sum(tf.cast(is_same, tf.int32))

    assert call(check, tf.fill([12], True)) == 12
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("Look: 'v3', 'v11'.")):
        call(check, tf.constant([i not in (3, 11) for i in range(12)]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("'v0', 'v1'", "'v7' and 4 more.")):
        call(check, tf.constant(np.zeros(12, bool)))
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("`is_same` must have shape [12]")):
        call(check, tf.constant([True]))


@pytest.mark.parametrize("workers", [1, 3], ids=["average", "sum"])
def test_numbers_that_ranks_said_alike_pass(lib, call, workers):
    def check(reduced, mine):
        how = dict(workers=workers, size=3, may_be_silent=True, problem="Look:", names=["v0", "v1"])
        op = lib.sok_check_reduced(reduced, mine, **how)
        with tf.control_dependencies(filter(None, [op])):
            return tf.identity(reduced)

    mine = np.array([1.0, 5.0, 4092.0], np.float32)
    call(check, mine * workers, mine)
    call(check, mine * workers + 0.1, mine)  # short floats round
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("Look: 'v1'.")):
        call(check, mine * workers + np.array([0, 0, workers / 3], np.float32), mine)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("Look: 'v0', 'v1'.")):
        call(check, np.array([workers, np.nan, np.inf], np.float32), mine)
    # One of three has nothing to say, and nobody is blamed.
    call(check, np.array([workers * 2 / 3, 0, 0], np.float32), mine)
    call(check, np.array([np.nan, 0, 0], np.float32), mine)
    for reduced, other in ((mine[:2], mine), (mine, mine[:2])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=saying("must have shape [3]")):
            call(check, reduced, other)
