"""The ops of the exchange give on a GPU's kernels what they give on the CPU, whose judge is NumPy (tests/ops)."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.ops.tables import KEY_TYPES
from tests.ops.test_exchange_combine import random_feature
from tests.ops.test_exchange_wire import SIZES, messages_of
from tests.ops.worlds import FINE, NO_WEIGHTS, World, i32
from tests.reference.exchange import all_to_all
from tests.reference.exchange_wire import TYPES

from .conftest import GPU

CPU = "/CPU:0"


def look_up(world, features, upstream, insert):
    """All that the ops say there and back: by rank answers, outputs, packed gradients; rows and their sums."""
    tables = [f[0] for f in features[0]]
    routed = [world.route(r, of_rank, insert) for r, of_rank in enumerate(features)]
    served = world.serve_all(routed, tables, insert)
    home = all_to_all([t.answers.numpy() for t in served], [t.answer_splits.numpy() for t in served])
    outputs, packed, of_weights, splits_back = [], [], [], []
    for r, (answers, splits) in enumerate(zip(*home, strict=True)):
        outputs.append(world.combine(answers, splits, routed[r], features[r]))
        weights = [NO_WEIGHTS if f[3] is None else f[3] for f in features[r]]
        combiners, dims = [f[4] for f in features[r]], [world.dims[t] for t in tables]
        grads = [u[: len(o)] for u, o in zip(upstream[r], outputs[r], strict=True)]
        rest = (routed[r].index, routed[r].splits_home, weights, routed[r].scales)
        packed.append(
            _ops.lib().sok_exchange_combine_grad(grads, splits, *rest, combiners=combiners, dims=dims).numpy()
        )
        splits_back.append(splits)
        for f, w in enumerate(weights):
            if len(w) > 0:
                one = [[of_feature[f]] for of_feature in rest]
                of_weights.append(
                    _ops.lib().sok_exchange_combine_grad_weights(
                        grads[f], answers, *one, combiners=[combiners[f]], dims=[dims[f]]
                    )
                )
    sums = []
    for r, (gradients, _) in enumerate(zip(*all_to_all(packed, splits_back), strict=True)):
        row_ids, of_rows = _ops.lib().sok_exchange_sum_grad(
            gradients, served[r].counts, served[r].piece_splits, served[r].row_ids, table_of=tables, dims=world.dims
        )
        for ids, rows in zip(row_ids, of_rows, strict=True):
            order = np.argsort(ids.numpy())
            # On a GPU there is room behind the sums: zeros of row id -1.
            order = order[np.searchsorted(ids.numpy()[order], 0) :]
            sums.append((ids.numpy()[order], rows.numpy()[order]))
    exact = [t.words for t in routed], [t.answers for t in served], [t.row_ids for t in served], outputs
    assert all(world.device in t.answers.device for t in served)
    return exact, (packed, of_weights, sums)


def world_on(device, *args, **options):
    world = World(*args, **options)
    world.device = device.strip("/")
    return world


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_lookup_there_and_back_is_that_of_the_cpu(data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    dtypes = data.draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=3))
    dims = [data.draw(st.sampled_from([1, 3, 8, 33])) for _ in dtypes]
    plan = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(dims) - 1), st.sampled_from(["sum", "mean", "sqrtn", "rows"]), st.booleans()),
            min_size=1,
            max_size=4,
        )
    )
    options = {
        "hashed": data.draw(st.booleans()),
        "ways": [data.draw(st.sampled_from(["auto", "rows", "sums"])) for _ in dims],
    }
    size, found = data.draw(st.integers(1, 3)), {}
    insert = data.draw(st.lists(st.booleans(), min_size=1, max_size=2))
    for device in (CPU, GPU):
        rng = np.random.default_rng(seed)
        with tf.device(device):
            world = world_on(device, size, dtypes, dims, **options)
            found[device] = []
            for inserts in insert:
                features = [
                    [random_feature(rng, t, dtypes[t], combiner, w and combiner != "rows") for t, combiner, w in plan]
                    for _ in range(size)
                ]
                upstream = [[rng.normal(size=(99, dims[t])).astype(np.float32) for t, *_ in plan] for _ in range(size)]
                found[device].append(look_up(world, features, upstream, inserts))
    for (exact, close), (other_exact, other_close) in zip(found[CPU], found[GPU], strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, exact, other_exact)
        tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), close, other_close)


def all_routes(size, dtypes, dims, features, hashed=True, **limits):
    """What each rank says: by `ExchangeRoute`, by `ExchangeRouteRows`, and by that of keys on the GPU."""
    found = []
    for device, rows_alone in ((CPU, False), (CPU, True), (GPU, True)):
        with tf.device(device):
            world = world_on(device, size, dtypes, dims, hashed=hashed, ways=["rows"] * len(dims))
            found.append([])
            for rank, of_rank in enumerate(features):
                routed = world.route(rank, of_rank, call=7, program=3, rows_alone=rows_alone, **limits)
                found[-1].append([routed.words, routed.splits, routed.asked, *routed.index])
                assert all(device.strip("/") in index.device for index in routed.index)
    return found


def assert_same(found):
    for other in found[1:]:
        tf.nest.map_structure(np.testing.assert_array_equal, found[0], other)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_keys_on_a_gpu_are_routed_as_on_the_cpu(data):
    dtypes = data.draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=3))
    dims = [data.draw(st.sampled_from([1, 3, 8])) for _ in dtypes]
    plan = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(dims) - 1), st.sampled_from(["sum", "mean", "rows"]), st.booleans()),
            min_size=1,
            max_size=6,
        )
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    size = data.draw(st.integers(1, 4))
    features = [[random_feature(rng, t, dtypes[t], c, w and c != "rows") for t, c, w in plan] for _ in range(size)]
    # In an identity table some of these keys are illegal.
    assert_same(all_routes(size, dtypes, dims, features, hashed=data.draw(st.booleans())))


@pytest.mark.parametrize(
    "feature, limits",
    [
        ((0, [1, 2], [0, 5], None, "sum"), {}),  # splits that make no sense
        ((0, [1, 2, 3], [0, 3], None, "sum"), {"max_nnz": 2}),
        ((0, [1, 2, 3], [0, 3], None, "sum"), {"max_feature_num": 2}),
        ((0, [1, 2, 3], [0, 3], [1.0], "sum"), {}),  # weights that are too few
        ((0, [1, 10**6], None, None, "rows"), {}),  # a key that an identity table does not have
        ((0, [], [0, 0, 0], None, "mean"), {}),
    ],
)
def test_what_is_wrong_with_keys_on_a_gpu_is_told_as_on_the_cpu(feature, limits):
    good = (0, [0, 1], [0, 2], None, "sum")
    assert_same(all_routes(2, [tf.int64], [4], [[good, feature]] * 2, hashed=False, **limits))


def test_what_an_owner_says_is_raised_in_its_words(lib):
    text = "table 'x' has 10 of 10 rows."

    def combine(answers, splits, asked, index=(16,), row_splits=(0, 1), dim=2):
        return lib.sok_exchange_combine(
            *lib.sok_exchange_check(np.array(answers, np.float32), i32(*splits), i32(*asked)),
            [i32(*index)],
            [np.array(row_splits)],
            [NO_WEIGHTS],
            [NO_WEIGHTS],
            combiners=["sum"],
            dims=[dim],
        )[0]

    good = [0.0] * 16 + [3.0, 4.0]
    with tf.device(GPU):
        np.testing.assert_array_equal(combine(good, [18], [18]), [[3.0, 4.0]])
        for status, error in (
            (1, tf.errors.ResourceExhaustedError),
            (2, tf.errors.ResourceExhaustedError),
            (3, tf.errors.InvalidArgumentError),
            (4, tf.errors.FailedPreconditionError),
            (5, tf.errors.InternalError),
        ):
            bad = [status, len(text), *[0.0] * 14, *text.encode()]
            # A text as long as the rows would have been is one all the same.
            with pytest.raises(error, match=f"rank 1 could not answer: {text}"):
                combine([*good, *bad], [18, len(bad)], [18, len(bad)])
        for splits, asked, message in (
            ([18], [17], "not those that were asked for"),
            ([17], [17], "`splits` does not fit"),
            ([18, 3], [18, 3], "`splits` does not fit"),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                combine(good, splits, asked)
        # What lies outside reads as zeros: a device cannot say so in time.
        np.testing.assert_array_equal(combine(good, [18], [18], index=[17]), [[0.0, 0.0]])
        np.testing.assert_array_equal(combine(good, [18], [18], row_splits=[0, 9]), [[0.0, 0.0]])
        for options in ({"row_splits": [[0, 1]]}, {"row_splits": []}):
            with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits"):
                combine(good, [18], [18], **options)


@pytest.mark.parametrize("key", [40, 1])
def test_a_key_that_is_not_this_owner_s_is_answered_in_words(key):
    """An identity table of two workers with 20 rows each; rank 0 has the even keys below 40."""
    with tf.device(GPU):
        world = World(2, hashed=False, capacity=20)
        # Each rank asks for one key by rows.
        words = np.array([*FINE, 1, 0, 0, 2, *FINE, 1, 0, 0, key])
        served = world.serve(0, words, i32(11, 11))
        answer = served.answers.numpy()
        assert answer[0] == 3 and served.answer_splits.numpy().tolist() == [16 + int(answer[1]) + 1] * 2
        text = bytes(answer[16 : served.answer_splits[0]].astype(np.uint8)).decode()
        assert ("key 40 is outside" if key == 40 else "key 1 belongs to rank 1") in text
        assert [ids.shape for ids in served.row_ids] == [[0]] and not served.counts.numpy().any()
        # And nothing was kept of the other key.
        words[-1] = 4
        assert world.serve(0, words, i32(11, 11), insert=True).answers[0] == 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_of_16_bit_values_are_those_of_the_cpu(rng, dtype, sizes):
    messages = messages_of(rng, sizes)
    splits, found = i32(*map(len, messages)), {}
    for device in (CPU, GPU):
        with tf.device(device):
            words, word_splits = _ops.lib().sok_exchange_narrow(np.concatenate(messages), splits, type=dtype)
            floats, float_splits = _ops.lib().sok_exchange_widen(words, word_splits, splits, type=dtype)
            other, _ = _ops.lib().sok_exchange_widen(words, word_splits, splits + 2, type=dtype)
        assert device.strip("/") in words.device and device.strip("/") in floats.device
        found[device] = [x.numpy().view(np.uint32) for x in (words, floats, other)]
        found[device] += [word_splits.numpy(), float_splits.numpy()]
    for here, there in zip(found[CPU], found[GPU], strict=True):
        np.testing.assert_array_equal(there, here)
    with tf.device(GPU), pytest.raises(tf.errors.InvalidArgumentError, match="must sum to"):
        _ops.lib().sok_exchange_narrow(np.zeros(17, np.float32), i32(16), type=dtype)


def test_full_tables_are_full_for_all_askers():
    with tf.device(GPU):
        world = World(2, capacity=2)
        asked = lambda *keys: np.array([*FINE, len(keys), 0, 0, *keys, *FINE, 1, 0, 0, keys[0]])  # noqa: E731
        too_many = world.serve(0, asked(2, 4, 6), i32(13, 11))
        assert too_many.answers[0] == 1
        served = world.serve(0, asked(8, 10), i32(12, 11))
        assert served.answers[0] == 0 and served.row_ids[0].numpy().tolist() == [0, 1, 0]


def test_counting_collectives_leaves_tensors_where_they_are(lib):
    with tf.device(GPU):
        x = tf.constant([1.0, 2.0])
        counted = lib.sok_trace_collective(x, [], collective="device/x", kind="all_to_all")
        done = lib.sok_trace_collective_done(counted, [], collective="device/x")
    for tensor in (counted, done):
        assert GPU.strip("/") in tensor.device
        np.testing.assert_array_equal(tensor, x)


@pytest.fixture(scope="module")
def lib():
    return _ops.lib()
