"""Messages of 16-bit values, made and read; and lookups whose messages these are. NumPy moves them, and judges."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.messages import saying
from tests.ops.test_exchange_combine import random_feature
from tests.ops.worlds import World, i32, rows
from tests.reference import combine as combine_reference
from tests.reference.exchange import ANSWER_HEADER, all_to_all
from tests.reference.exchange_wire import TYPES, narrow, rounded
from tests.reference.judge import assert_close, assert_same

SIZES = [[0], [1], [2], [0, 3, 0], [5, 4, 33], [70_001, 0, 1]]


def bits(x):
    return np.asarray(x).view(np.uint32)


def messages_of(rng, sizes):
    """Of any words, but for NaN; with headers that would not survive rounding."""
    messages = [rng.integers(0, 2**32, ANSWER_HEADER + n, np.uint32).view(np.float32) for n in sizes]
    return [np.where(np.isnan(m), np.float32(1e-3), m) for m in messages]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_are_what_numpy_makes_of_them(rng, dtype, sizes):
    messages = messages_of(rng, sizes)
    splits = i32(*map(len, messages))
    words, word_splits = _ops.lib().sok_exchange_narrow(np.concatenate(messages), splits, type=dtype)
    expected = [narrow(message, dtype) for message in messages]
    assert_same(word_splits, list(map(len, expected)))
    assert_same(bits(words), bits(np.concatenate(expected)))
    floats, float_splits = _ops.lib().sok_exchange_widen(words, word_splits, splits, type=dtype)
    assert_same(float_splits, splits)
    back = [np.concatenate([m[:ANSWER_HEADER], rounded(m[ANSWER_HEADER:], dtype)]) for m in messages]
    assert_same(bits(floats), bits(np.concatenate(back)))


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_and_infinity_stay_what_they_are(dtype):
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 65519.0, 65520.0, 1e-9, -0.0], np.float32)
    message = np.concatenate([np.zeros(ANSWER_HEADER, np.float32), values])
    words, splits = _ops.lib().sok_exchange_narrow(message, i32(len(message)), type=dtype)
    floats, _ = _ops.lib().sok_exchange_widen(words, splits, i32(len(message)), type=dtype)
    assert_same(bits(floats[ANSWER_HEADER + 2 :]), bits(rounded(values[2:], dtype)))
    assert np.isnan(floats[ANSWER_HEADER : ANSWER_HEADER + 2]).all()
    is_half = dtype == "float16"
    assert_same(np.isinf(floats[ANSWER_HEADER + 2 :]), [True] * 4 + [False, is_half, False, False])


def test_a_message_of_another_size_than_expected_is_given_whole(rng):
    """As bad news are, of which nobody knows the size before."""
    message = messages_of(rng, [7])[0]
    words, splits = _ops.lib().sok_exchange_narrow(message, i32(len(message)), type="bfloat16")
    for expected, size in ((23, 23), (24, 24), (22, 24), (16, 24), (0, 24), (1000, 24)):
        floats, float_splits = _ops.lib().sok_exchange_widen(words, splits, i32(expected), type="bfloat16")
        assert_same(float_splits, [size])
        assert_same(floats[ANSWER_HEADER:23], rounded(message[ANSWER_HEADER:], "bfloat16"))
        assert size == 23 or floats[23] == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_bad_news_arrive_word_for_word(dtype):
    text = "tables 'ü' and 'x': no room".encode() * 9
    for n in (len(text), len(text) - 1):
        header = np.zeros(ANSWER_HEADER, np.float32)
        header[:2] = 3, n
        message = np.concatenate([header, np.frombuffer(text[:n], np.uint8), [0]]).astype(np.float32)
        words, splits = _ops.lib().sok_exchange_narrow(message, i32(len(message)), type=dtype)
        for asked in range(len(message) - 3, len(message) + 4):
            home, home_splits = _ops.lib().sok_exchange_widen(words, splits, i32(asked), type=dtype)
            with pytest.raises(tf.errors.InvalidArgumentError) as error:
                _ops.lib().sok_exchange_check(home, home_splits, i32(asked))
            assert f"could not answer: {text[:n].decode()} [Op:" in error.value.message


@pytest.mark.parametrize(
    "splits, text",
    [([15], "each with its header"), ([16, 15], "each with its header"), ([17], "must sum"), ([], "sum")],
)
def test_splits_that_do_not_fit_are_refused(splits, text):
    x = np.zeros(16, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        _ops.lib().sok_exchange_narrow(x, i32(*splits), type="float16")
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        _ops.lib().sok_exchange_widen(x, i32(*splits), i32(*splits), type="float16")


def test_sizes_that_do_not_fit_are_refused():
    x = np.zeros(16, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected.*shape"):
        _ops.lib().sok_exchange_widen(x, i32(16), i32(16, 16), type="float16")
    with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1"):
        _ops.lib().sok_exchange_narrow(x[None], i32(16), type="float16")


# Lookups.


class NarrowWorld(World):
    """Rows come home in 16 bit."""

    def __init__(self, *args, dtype, **kwargs):
        super().__init__(*args, **kwargs)
        self.dtype = dtype

    def attributes(self, tables, limits=None):
        return super().attributes(tables, limits) | {"exchange_dtype": self.dtype}

    def lookup(self, features_of_rank, insert=True, **limits):
        routed = [self.route(r, features, insert, **limits) for r, features in enumerate(features_of_rank)]
        served = self.serve_all(routed, [f[0] for f in features_of_rank[0]], insert, **limits)
        narrowed = [_ops.lib().sok_exchange_narrow(t.answers, t.answer_splits, type=self.dtype) for t in served]
        home = all_to_all([t.words.numpy() for t in narrowed], [t.word_splits.numpy() for t in narrowed])
        outputs = []
        for r, (words, splits) in enumerate(zip(*home, strict=True)):
            answers = _ops.lib().sok_exchange_widen(words, splits, routed[r].asked, type=self.dtype)
            outputs.append([o.numpy() for o in self.combine(*answers, routed[r], features_of_rank[r])])
        return outputs


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_outputs_are_those_of_rounded_rows(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype, size = data.draw(st.sampled_from(sorted(TYPES))), data.draw(st.integers(1, 3))
    dims = data.draw(st.lists(st.sampled_from([1, 3, 5, 8]), min_size=1, max_size=3))
    key_dtypes = [tf.int64] * len(dims)
    plan = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(dims) - 1), st.sampled_from(["sum", "mean", "sqrtn", "rows"]), st.booleans()),
            min_size=1,
            max_size=4,
        )
    )
    world = NarrowWorld(size, key_dtypes, dims, ways=["rows"] * len(dims), dtype=dtype)
    features = [
        [random_feature(rng, t, tf.int64, combiner, weighted and combiner != "rows") for t, combiner, weighted in plan]
        for _ in range(size)
    ]
    outputs = world.lookup(features)
    held = [{}, {}, {}]
    for shards in world.shards:
        for t, shard in enumerate(shards):
            held[t] |= {key: rounded(np.array(row), dtype) for key, row in shard.as_dict().items()}
    for of_rank, found in zip(features, outputs, strict=True):
        for (t, keys, row_splits, weights, combiner), output in zip(of_rank, found, strict=True):
            of_keys = np.array([held[t][int(key)] for key in keys], np.float32).reshape(-1, dims[t])
            if combiner == "rows":
                assert_same(output, of_keys)
            else:
                index = np.arange(len(keys))
                assert_close(output, combine_reference.combine(of_keys, index, row_splits, weights, combiner))


def test_a_narrower_row_may_be_the_shorter_way_home():
    """What is moved decides between rows and sums, and rows of 16 bit move half as much."""
    # Twice the same four keys of one owner, in a segment each: 4 (8 + 8 D) bytes by rows, 8 * 8 + 2 (8 + 8 D) by sums.
    # With D = 4 these are 160 and 144; in 16 bit 96 and 112.
    features = [(0, np.array([0, 2, 4, 6]), [0, 4], None, "sum")] * 2
    for dtype, by_sums in (("float32", True), ("float16", False), ("bfloat16", False)):
        got = NarrowWorld(2, dims=[4], dtype=dtype).route(0, features)
        assert got.index[0].shape == ([1] if by_sums else [4])


def test_ranks_that_round_otherwise_are_told_of_it():
    worlds = [NarrowWorld(3, dtype=dtype) for dtype in ("float32", "float16", "float16")]
    routed = [world.route(r, [rows([1, 2])]) for r, world in enumerate(worlds)]
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    for r, words in enumerate(zip(*received, strict=True)):
        with pytest.raises(
            tf.errors.FailedPreconditionError, match=saying("Received, by rank", "float32", "float16", "float16")
        ) as e:
            worlds[r].serve(r, *words)
        assert "`exchange_dtype`" in e.value.message and f"rank {r} of 3" in e.value.message
    # What is wrong with an input comes first, and so does `training`.
    routed[1] = worlds[1].route(1, [rows([1, 2])], insert=False)
    received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
    with pytest.raises(tf.errors.FailedPreconditionError, match=saying("`training`", "same", "by rank", "1", "0", "1")):
        worlds[0].serve(0, received[0][0], received[1][0])
