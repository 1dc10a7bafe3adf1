import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.table.placement import NUM_BUCKETS, buckets_of
from tests.messages import saying
from tests.ops.tables import KEY_TYPES, NativeTable
from tests.reference.initial_values import Initializer
from tests.reference.judge import assert_same, assert_same_table
from tests.reference.keys import extreme_keys
from tests.reference.table import TableFull


def test_two_tables_of_the_same_shape_are_two_tables():
    first, second = NativeTable(dim=1), NativeTable(dim=1)
    first.assign([1], [[5.0]])
    assert first.size() == 1 and second.size() == 0
    second.assign([1], [[6.0]])
    assert_same(first.lookup([1])[0], [[5.0]])


def test_named_handles_share_one_table_that_is_made_once():
    first = NativeTable(dim=1, shared_name="one_table")
    first.assign([1], [[5.0]])
    again = NativeTable(dim=1, shared_name="one_table")
    assert_same(again.lookup([1])[0], [[5.0]])
    assert NativeTable(dim=1, shared_name="another_table").size() == 0


def test_session_makes_the_table_on_first_use_and_never_resets_it(lib):
    with tf.Graph().as_default():
        table = NativeTable(dim=1, shared_name="session_table", init=Initializer("constant", 4.0))
        assign = table.assign([1], [[5.0]])
        rows, _ = table.lookup([1, 2])
        size = lib.sok_table_size(table.handle)
        for _ in range(2):
            with tf.compat.v1.Session() as session:
                assert_same(session.run(rows), [[4.0], [4.0]])
                session.run(assign)
                session.run(table.handle.op)  # what an init op would do again
                assert_same(session.run(rows), [[5.0], [4.0]])
                assert session.run(size) == 2


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("hashed", [True, False])
def test_export_gives_back_what_was_assigned(rng, key_dtype, hashed):
    table = NativeTable(dim=3, key_dtype=key_dtype, hashed=hashed)
    keys = extreme_keys(key_dtype.as_numpy_dtype) if hashed else np.array([5, 0, 2**20 - 1])
    rows = rng.normal(size=(len(keys), 3)).astype(np.float32)
    table.assign(keys, rows)
    got_keys, got_rows = table.export()
    assert got_keys.dtype == key_dtype.as_numpy_dtype
    assert_same_table(got_keys, got_rows, dict(zip(keys.tolist(), rows, strict=True)))


@pytest.mark.parametrize("key_dtype", KEY_TYPES)
@pytest.mark.parametrize("hashed", [True, False])
def test_keys_are_those_that_are_exported(lib, key_dtype, hashed):
    table = NativeTable(dim=3, key_dtype=key_dtype, hashed=hashed)
    keys = lambda: lib.sok_table_keys(table.handle, key_dtype=key_dtype)  # noqa: E731
    assert keys().shape == (0,) and keys().dtype == key_dtype
    stored = extreme_keys(key_dtype.as_numpy_dtype) if hashed else np.array([5, 0, 2**20 - 1])
    table.assign(stored, np.ones((len(stored), 3)))
    assert_same(keys().numpy(), table.export()[0])
    table.erase(stored[:1])
    assert_same(keys().numpy(), table.export()[0])
    assert len(keys()) == len(stored) - 1


def test_an_empty_table_exports_nothing():
    keys, rows = NativeTable(dim=3).export()
    assert keys.shape == (0,) and rows.shape == (0, 3)


def test_assign_of_nothing_changes_nothing():
    table = NativeTable()
    table.assign([], np.zeros((0, 3)))
    assert table.size() == 0 and table.erase([]) == 0


def test_assign_ignores_keys_of_other_ranks_and_keeps_the_last_duplicate():
    table = NativeTable(dim=1, world_size=2, rank=1)
    table.assign([1, 2, -1, 1], [[1.0], [2.0], [3.0], [4.0]])
    assert table.as_dict() == {1: (4.0,), -1: (3.0,)}


def test_assign_to_a_full_table_changes_nothing():
    table = NativeTable(dim=1, capacity=2)
    table.assign([1], [[1.0]])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="all 2 rows are in use"):
        table.assign([1, 2, 3], [[7.0], [7.0], [7.0]])
    assert table.as_dict() == {1: (1.0,)}


@pytest.mark.parametrize(
    ("owner", "remedy"),
    [
        (-1, "key mod 2 is 1.*unevenly .*row_wise.hash=True."),
        (1, r"table_wise.1.: .*row_wise.. spreads"),
        (-2, r"of each worker's shard\). .Op"),
    ],
    ids=["by key", "one owner", "by hash"],
)
def test_a_full_shard_says_what_it_holds_and_what_to_do(owner, remedy):
    table = NativeTable(dim=1, capacity=2, world_size=2, rank=1, owner=owner)
    keys = [k for k in range(1, 40, 2) if owner != -2 or buckets_of(np.array([k]))[0] >= NUM_BUCKETS // 2]
    with pytest.raises(tf.errors.ResourceExhaustedError, match=f"rank 1 of 2.*2 rows .*{remedy}"):
        table.lookup(keys)


@pytest.mark.parametrize("hashed", [True, False])
def test_an_erased_key_comes_back_fresh(hashed):
    table = NativeTable(dim=2, capacity=8, hashed=hashed)
    fresh = table.lookup([3, 4])[0].numpy()
    table.assign([3, 4], [[9.0, 9.0], [8.0, 8.0]])
    assert table.erase([3, 3, 5]) == 1
    assert table.size() == 1 and set(table.as_dict()) == {4}
    rows, row_ids = table.lookup([3, 4], insert=False)
    assert_same(rows, [fresh[0], [8.0, 8.0]])
    assert_same(row_ids[0], -1)
    assert_same(table.lookup([3])[0], fresh[:1])
    assert table.size() == 2


def test_a_new_key_in_an_erased_row_has_fresh_slots():
    table = NativeTable(dim=1, capacity=1, init=Initializer("constant", 0.0))
    adagrad = {"hyper": (1.0, 0.5, 0.0), "rule": "adagrad", "slot_set": "a"}
    table.apply(table.lookup([1])[1], [[2.0]], **adagrad)
    assert_same(table.slots("a")[1], [[4.5]])
    table.erase([1])
    table.lookup([2])
    keys, slots, stamps = table.slots("a")
    assert_same(keys, [2])
    assert_same(slots, [[0.5]])
    assert_same(stamps, [-1])


def test_erase_ignores_keys_of_other_ranks():
    table = NativeTable(dim=1, world_size=2, rank=0)
    table.lookup([2])
    assert table.erase([1, 3]) == 0 and table.size() == 1


def test_many_erasures_and_insertions_lose_nothing(rng):
    table = NativeTable(dim=1, capacity=30_000)
    held: dict[int, tuple[float, ...]] = {}
    for round_ in range(12):
        new = rng.integers(-(2**62), 2**62, 2_500)
        table.assign(new, np.full((len(new), 1), float(round_)))
        held.update({int(k): (float(round_),) for k in new})
        gone = rng.choice(np.array(list(held), np.int64), 1_500, replace=False)
        assert table.erase(gone) == len(gone)
        for key in gone:
            del held[int(key)]
    assert table.as_dict() == held
    assert_same(table.lookup(gone, insert=False)[1], np.full(len(gone), -1))


_key = st.integers(-4, 12) | st.sampled_from([2**63 - 1, -(2**63), 2**32, -(2**31)])
_step = st.one_of(
    st.tuples(st.just("lookup"), st.lists(_key, max_size=8)),
    st.tuples(st.just("read"), st.lists(_key, max_size=8)),
    st.tuples(st.just("assign"), st.lists(st.tuples(_key, st.floats(-5, 5, width=32)), max_size=8)),
    st.tuples(st.just("erase"), st.lists(_key, max_size=8)),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(_step, max_size=12), st.integers(1, 12))
def test_the_table_behaves_as_a_dict(steps, capacity):
    table = NativeTable(dim=1, capacity=capacity)
    judge = table.expected
    for what, args in steps:
        if what == "assign":
            keys = np.array([k for k, _ in args], np.int64)
            values = np.array([[v] for _, v in args], np.float32).reshape(-1, 1)
            actions = (lambda: judge.assign(keys, values)), (lambda: table.assign(keys, values))  # noqa: B023
        elif what == "erase":
            keys = np.array(args, np.int64)
            assert table.erase(keys) == judge.erase(keys)
            continue
        else:
            keys = np.array(args, np.int64)
            insert = what == "lookup"
            actions = (lambda: judge.lookup(keys, insert)), (lambda: table.lookup(keys, insert)[0])  # noqa: B023
        try:
            expected = actions[0]()
        except TableFull:
            with pytest.raises(tf.errors.ResourceExhaustedError):
                actions[1]()
        else:
            got = actions[1]()
            if expected is not None:
                assert_same(got, expected)
        assert table.size() == len(judge.rows)
    assert_same_table(*table.export(), judge.rows)


def test_shapes_are_inferred(lib):
    with tf.Graph().as_default():
        handle = tf.compat.v1.placeholder(tf.resource, [])
        keys, rows = lib.sok_table_export(handle, key_dtype=tf.uint32, dim=4)
        assert keys.shape.as_list() == [None] and rows.shape.as_list() == [None, 4] and keys.dtype == tf.uint32
        keys, slots, stamps = lib.sok_table_slots(handle, key_dtype=tf.int64, slot_set="a")
        assert keys.shape.as_list() == stamps.shape.as_list() == [None] and slots.shape.as_list() == [None, None]
        assert lib.sok_table_size(handle).shape == []
        assert lib.sok_table_erase(handle, tf.zeros([3], tf.int64)).shape == []
        with pytest.raises(ValueError, match="rank 2"):
            lib.sok_table_assign(handle, tf.zeros([3], tf.int64), tf.zeros([3]))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"capacity": 2**32}, "capacity must lie in"),
        ({"rank": 2, "world_size": 2}, r"\[0, world_size\).*rank 2 of 2"),
        ({"init": Initializer("zeros")}, "initializer must be 'constant', 'uniform'.*Received: 'zeros'"),
        ({"init": Initializer("bank")}, "bank must have shape"),
        ({"init": Initializer("bank", bank=np.zeros((1, 4), np.float32))}, "bank must have shape"),
        ({"dim": 0}, "dim"),
        ({"key_dtype": tf.int16}, "int16"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(config, text):
    with pytest.raises((tf.errors.InvalidArgumentError, TypeError), match=text):
        NativeTable(**config)


def test_wrong_arguments_are_named(lib):
    table = NativeTable(dim=3, name="shop")
    cases = [
        (lambda: table.assign([1], [[1.0, 2.0]]), r"`rows` must have shape \[1,3\]. Received: \[1,2\]"),
        (lambda: table.assign([[1]], [[1.0, 2.0, 3.0]]), "`keys` must have rank 1"),
        (lambda: table.assign(tf.constant([1], tf.uint64), np.zeros((1, 3))), "keys must be int64. Received: uint64"),
        (lambda: table.erase([[1]]), "`keys` must have rank 1"),
        (lambda: table.erase(tf.constant([1], tf.uint64)), "keys must be int64. Received: uint64"),
        (lambda: lib.sok_table_export(table.handle, key_dtype=tf.int32, dim=3), "keys must be int64. Received: int32"),
        (lambda: lib.sok_table_keys(table.handle, key_dtype=tf.int32), "keys must be int64. Received: int32"),
        (lambda: lib.sok_table_slots(table.handle, key_dtype=tf.int32, slot_set="a"), "keys must be int64"),
        (lambda: lib.sok_table_export(table.handle, key_dtype=tf.int64, dim=4), "rows have dim 3. Received: 4"),
    ]
    for case, text in cases:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            case()


def test_unknown_slot_set_is_a_failed_precondition():
    table = NativeTable(dim=1, name="shop")
    with pytest.raises(tf.errors.FailedPreconditionError, match=saying("table 'shop'", "slot set 'adam' yet", "none")):
        table.slots("adam")
    table.apply([], np.zeros((0, 1)), slot_set="sgd")
    with pytest.raises(tf.errors.FailedPreconditionError, match="Known: 'sgd'"):
        table.slots("adam")


@pytest.mark.parametrize("hashed", [True, False])
def test_reserving_room_changes_nothing_that_can_be_seen(lib, hashed):
    table = NativeTable(capacity=50_000, hashed=hashed)
    before = table.lookup(range(100))[0]
    lib.sok_table_reserve(table.handle, 50_000)
    assert_same(table.lookup(range(100), insert=False)[0], before)
    assert table.size() == 100
    table.lookup(range(50_000))
    assert table.size() == 50_000


@pytest.mark.parametrize("rows", [-1, 11])
def test_more_than_the_capacity_cannot_be_reserved(lib, rows):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"can reserve 0 to 10 rows .* Received: {rows}"):
        lib.sok_table_reserve(NativeTable(capacity=10).handle, rows)


def test_more_than_the_memory_cannot_be_reserved(lib):
    """It is refused at once: the system would give the addresses, and end the process that uses them."""
    table = NativeTable(dim=256, capacity=2**32 - 2)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"reserve 4294967294 rows takes 41\d\d\.\d\d GiB more"):
        lib.sok_table_reserve(table.handle, 2**32 - 2)
